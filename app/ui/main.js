/** Starts the page: the state of the server, and five views, of which one is shown. */

import { byId } from "./core/dom.js";
import { Models } from "./core/models.js";
import { ServerStatus } from "./core/status.js";
import { readLink } from "./core/take.js";

const status = new ServerStatus();
const models = new Models(status);
/** The code of the first view is loaded first, that of the others after the page has loaded. */
const LOADERS = {
  text: async () => (await import("./text/view.js")).createTextView(models),
  match: async () => (await import("./match/view.js")).createMatchView(models),
  search: async () => (await import("./search/view.js")).createSearchView(models),
  extract: async () => (await import("./extract/view.js")).createExtractView(models),
  service: async () => new (await import("./service/view.js")).ServiceView(status),
};
const loading = {};
let shown = null;
/** The links that have filled in views; nothing is sent before the user agrees. */
const pending = {};

/** Loads the view; if its code cannot be loaded, tries again when the server is back. */
function load(name) {
  loading[name] ??= LOADERS[name]().catch(() => {
    delete loading[name];
    return new Promise((resolve) => {
      status.addEventListener("back", () => resolve(load(name)), { once: true });
    });
  });
  return loading[name];
}

function showView() {
  const link = readLink(location.hash);
  const name = Object.hasOwn(LOADERS, link.view) ? link.view : (shown ?? "text");
  if (link.fields || link.isLong) takeLink(name, link);
  showPending(name);
  if (name === shown) return;
  loading[shown]?.then((view) => view.hide?.());
  for (const view of Object.keys(LOADERS)) {
    byId(`${view}-view`).hidden = view !== name;
    const link = byId(`to-${view}`);
    if (view === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${byId(`to-${name}`).textContent} · Smart Embedder`;
  if (shown !== null) {
    byId(`${name}-title`).focus({ preventScroll: true });
    scrollTo(0, 0);
  }
  shown = name;
  load(name).then((view) => shown === name && !pending[name] && view.show());
}

function takeLink(name, link) {
  history.replaceState(null, "", `#${name}`); // Keep the texts of a link out of the address.
  for (const [id, value] of link.fields ?? []) {
    byId(id).value = value;
    byId(id).closest("details")?.setAttribute("open", ""); // Make the field visible.
  }
  pending[name] = link;
}

function showPending(name) {
  const link = pending[name];
  byId("link-bar").hidden = !link;
  byId("link-open").hidden = !link?.fields;
  const model = [link?.embedder, link?.reranker, link?.extractor].filter(Boolean).join(" and ").slice(0, 200);
  byId("link-text").textContent = link?.isLong
    ? "The link is too long, so it was not read."
    : `A link has filled in this view${model && `, for ${model}`}. Nothing has been sent yet.`;
  if (link?.isLong) delete pending[name];
}

byId("link-open").onclick = async () => {
  const name = shown;
  const link = pending[name];
  await models.pick(link);
  delete pending[name];
  showPending(name);
  (await load(name)).open(link);
};

byId("skip").onclick = (event) => {
  event.preventDefault(); // The address names the view.
  byId(`${shown}-title`).focus();
};
addEventListener("hashchange", showView);
addEventListener("load", () => Object.keys(LOADERS).forEach(load));
models.addEventListener("choice", () => load(shown).then((view) => !pending[shown] && view.choose?.()));
status.start();
showView();
