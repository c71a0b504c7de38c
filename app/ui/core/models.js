/** The served models, and those that the page uses; the user chooses if there are several. */

import { ApiError, tokenize } from "./api.js";
import { byId, element } from "./dom.js";

const NO_RERANKER = "none";
const LATE_INTERACTION = "late-interaction";
const STORED = "smart-embedder-";
const STATES = { unloaded: "not loaded", loading: "being loaded", failed: "failed" };

/**
 * A model as requests name it; `key` is empty for the default. `tokenizer` is the model whose tokens
 * are shown. `kinds` and `inputTypes` are null as long as the model has not been loaded.
 */
function offer({ name, state, reason, makes }, key = name) {
  return {
    key,
    label: name,
    tokenizer: name,
    makers: [name],
    state,
    reason,
    kinds: makes?.kinds ?? null,
    inputTypes: makes?.input_types ?? null,
    maxLength: makes?.max_length ?? null,
    readsImages: makes?.reads_images ?? false,
    readsLabels: makes?.reads_labels ?? false,
  };
}

/** The embedding models that a request may name, the default first. */
export function embeddersOf({ model, dense_embedding_model: dense, served_models: served }) {
  const embedders = served.filter((model) => model.task === "embed");
  const find = (name) => embedders.find((model) => model.name === name) ?? { name };
  const further = embedders.filter(({ name }) => name !== model && name !== dense);
  const first = dense === model ? [offer(find(model), "")] : pair(find(dense), find(model));
  return [...first, ...further.map((model) => offer(model))];
}

/** The default pair, a model for dense vectors and one for the others; then the latter alone. */
function pair(dense, rest) {
  const [one, other] = [offer(dense), offer(rest)];
  const others = other.kinds?.filter((kind) => kind !== "dense");
  // A model that makes only dense vectors is of no use here.
  const shown = others?.length === 0 ? one : other;
  const both = {
    ...shown,
    key: "",
    label: `${one.label} + ${other.label}`,
    makers: [one.label, other.label],
    kinds: one.kinds && others ? ["dense", ...others] : null,
    inputTypes: [...new Set([...(one.inputTypes ?? []), ...(other.inputTypes ?? [])])],
    readsImages: one.readsImages && shown.readsImages,
  };
  return [both, other];
}

/** The rerankers, the default first. */
export function rerankersOf({ model, reranker_model: own, served_models: served }) {
  const rerankers = served.filter((model) => model.task === "rerank");
  const further = rerankers.filter(({ name }) => name !== own).map((model) => offer(model));
  if (own === NO_RERANKER) return further;
  const late = { name: `late interaction of ${model}`, state: "ready", makes: { kinds: ["scores"] } };
  const first = own === LATE_INTERACTION ? late : rerankers.find(({ name }) => name === own);
  return [offer(first ?? { name: own }, ""), ...further];
}

/** The models that find spans. */
const extractorsOf = ({ served_models: served }) =>
  served.filter((model) => model.task === "extract").map((model) => offer(model));

const OFFERS = { embedder: embeddersOf, reranker: rerankersOf, extractor: extractorsOf };

/** Fires `choice` when another model is chosen. */
export class Models extends EventTarget {
  #offered = { embedder: [], reranker: [], extractor: [] };
  #keys = {};

  constructor(status) {
    super();
    this.status = status;
    for (const what of Object.keys(OFFERS)) {
      this.#keys[what] = sessionStorage.getItem(STORED + what) ?? "";
      byId(what).onchange = ({ target }) => this.#choose(what, target.value);
    }
    status.addEventListener("health", () => this.#refresh());
  }

  /** The name of the chosen embedding model in requests. */
  get embedderKey() {
    return this.#keys.embedder;
  }

  /** The same for the chosen reranker. */
  get rerankerKey() {
    return this.#keys.reranker;
  }

  /** The same for the chosen model that finds spans. */
  get extractorKey() {
    return this.#keys.extractor;
  }

  /** The chosen embedding model, or that of a `key`; waits until it is loaded. */
  embedder(signal, key) {
    return this.#known("embedder", signal, key);
  }

  /** Lists the embedding models in a `select`; returns whether there are several. */
  listIn(select) {
    const chosen = select.selectedIndex < 0 ? this.#keys.embedder : select.value;
    fillSelect(select, this.#offered.embedder, chosen);
    return this.#offered.embedder.length > 1;
  }

  /** The chosen reranker, or null if there is none. */
  reranker(signal) {
    return this.#known("reranker", signal);
  }

  /** The chosen model that finds spans, or null if there is none. */
  extractor(signal) {
    return this.#known("extractor", signal);
  }

  /** Chooses models by their names in requests, if they are served. */
  async pick(keys) {
    await this.status.known();
    for (const what of Object.keys(OFFERS)) {
      const isServed = this.#offered[what].some(({ key }) => key === keys[what]);
      if (isServed && keys[what] !== this.#keys[what]) this.#choose(what, keys[what]);
    }
  }

  async #known(what, signal, key) {
    await this.status.known();
    let chosen = this.#chosen(what, key);
    if (chosen && !chosen.kinds) {
      await tokenize(["."], chosen, { signal }); // Loads the model.
      await this.status.refresh();
      chosen = this.#chosen(what, key);
    }
    if (chosen && !chosen.kinds)
      throw new ApiError(503, "loading", `${chosen.label} is being loaded.`, 1);
    return chosen ?? null;
  }

  #chosen(what, wanted = this.#keys[what]) {
    return this.#offered[what].find(({ key }) => key === wanted);
  }

  #choose(what, key) {
    this.#keys[what] = key;
    sessionStorage.setItem(STORED + what, key);
    this.#show();
    this.dispatchEvent(new Event("choice"));
  }

  /** Lists the models of /health; after a restart, a chosen one may be missing. */
  #refresh() {
    for (const [what, offersOf] of Object.entries(OFFERS)) {
      this.#offered[what] = offersOf(this.status.health);
      const first = this.#offered[what][0]?.key ?? "";
      if (!this.#chosen(what) && this.#keys[what] !== first) this.#choose(what, first);
    }
    this.#show();
  }

  #show() {
    for (const what of Object.keys(OFFERS)) {
      byId(`${what}-choice`).hidden = this.#offered[what].length < 2;
      fillSelect(byId(what), this.#offered[what], this.#keys[what]);
    }
    byId("to-extract").hidden = !this.#offered.extractor.length;
    const isHidden = Object.values(this.#offered).every((offered) => offered.length < 2);
    byId("model-bar").hidden = isHidden;
    const says = this.#offered.embedder.length > 1 || this.#offered.reranker.length > 1;
    const said = says ? sentenceOf(this.#chosen("embedder")) : "";
    if (byId("model-state").textContent !== said) byId("model-state").textContent = said;
  }
}

/** Updates only the changed options, so that an open list stays open. */
function fillSelect(select, offered, chosen) {
  const isSame = offered.every(({ key }, i) => select.options[i]?.value === key);
  if (!isSame || select.options.length !== offered.length)
    select.replaceChildren(...offered.map(({ key }) => element("option", { value: key })));
  offered.forEach(({ label, state }, i) => {
    const text = state in STATES ? `${label} (${STATES[state]})` : label;
    if (select.options[i].textContent !== text) select.options[i].textContent = text;
  });
  select.value = chosen;
}

function sentenceOf({ label, state, reason, kinds }) {
  if (state === "unloaded") return "It is loaded when it is first used.";
  if (state === "loading") return `${label} is being loaded.`;
  if (state === "failed") return reason ?? "";
  return kinds ? `It makes ${namesOf(kinds)} vectors.` : "";
}

const NAMES = { dense: "dense", sparse: "sparse", colbert: "ColBERT" };

/** Kinds of output in words: "dense, sparse and ColBERT". */
export function namesOf(kinds) {
  return new Intl.ListFormat("en-GB").format(kinds.map((kind) => NAMES[kind] ?? kind));
}

/**
 * One sentence on the kinds of vectors that a model makes, and on the parts of the view that are
 * missing without the others (`lost`, by kind); empty if it makes all kinds.
 */
export function missingSentence({ makers, kinds }, lost) {
  const missing = Object.keys(lost).filter((kind) => !kinds.includes(kind));
  if (!missing.length) return "";
  const list = new Intl.ListFormat("en-GB");
  const make = makers.length > 1 ? "make" : "makes";
  return (
    `${list.format(makers)} ${make} only ${namesOf(kinds)} vectors, so there ` +
    `is ${list.format(missing.map((kind) => lost[kind]))}.`
  );
}
