/** The view Match: compares a query with passages, word by word. */

import { embed, embedRequest, readAs, tokenize, withTokens } from "../core/api.js";
import { byId, element, onPause } from "../core/dom.js";
import { decimal, plural } from "../core/format.js";
import { showLead } from "../core/lead.js";
import { TakeBar } from "../core/take.js";
import { splitTexts } from "../core/texts.js";
import { LatestWork } from "../core/work.js";
import { compare, readText } from "./compare.js";
import { renderHeatMap } from "./heat_map.js";
import { renderRibbon } from "./ribbon.js";
import { PASSAGES, QUERY } from "./samples.js";
import { matchTable, sharedTable } from "./tables.js";

const PAUSE = 400;
const MOST_PASSAGES = 32;
const SCORES = { dense: "Dense", sparse: "Sparse", colbert: "ColBERT" };
const HEADLINES = {
  dense: "Dense (cosine)",
  sparse: "Sparse (dot product)",
  colbert: "ColBERT (mean of best matches)",
};
/** The passages are sorted by the first of these scores that exists. */
const ORDER = ["colbert", "dense", "sparse"];
const LOST = {
  dense: "no dense score",
  sparse: "no list of shared words",
  colbert: "no matches between words",
};

export function createMatchView(models) {
  const [query, passages] = [byId("match-query"), byId("match-passages")];
  const work = new LatestWork(byId("match-message"), models.status);
  const bar = new TakeBar("match", models);
  const run = () =>
    work.run((signal) => match(query.value.trim(), passages.value, models, bar, signal));
  let asked = null;

  onPause(query, "input", PAUSE, run);
  onPause(passages, "input", PAUSE, run);
  const show = () => {
    if (asked === models.embedderKey) return;
    if (asked === null) {
      query.value ||= QUERY;
      passages.value ||= PASSAGES;
    }
    asked = models.embedderKey;
    run();
  };
  const open = () => {
    asked = models.embedderKey;
    run();
  };
  return { show, choose: show, open };
}

async function match(query, value, models, bar, signal) {
  const texts = splitTexts(value).slice(0, MOST_PASSAGES);
  byId("match-output").hidden = !query || !texts.length;
  if (!query || !texts.length) return;
  const model = await models.embedder(signal);
  const [asQuery, asDocument] = ["query", "document"].map((type) => ({
    ...readAs(type, model),
    ...withTokens(model),
  }));
  const [asked, found, [queryTokens, ...tokens]] = await Promise.all([
    embed([query], model, asQuery, { signal }),
    embed(texts, model, asDocument, { signal }),
    tokenize([query, ...texts], model, { signal }),
  ]);
  if (signal.aborted) return;
  const [order] = ORDER.filter((kind) => model.kinds.includes(kind));
  const read = readText(query, queryTokens, asked.texts[0]);
  const comparisons = texts
    .map((text, i) => ({
      ...compare(read, readText(text, tokens[i], found.texts[i])),
    }))
    .sort((a, b) => b.scores[order] - a.scores[order]);
  showLead("match", model, LOST);
  bar.show(
    [embedRequest([query], model, asQuery), embedRequest(texts, model, asDocument)],
    comparisons.map(({ passage, scores, shared }) => ({
      passage: passage.text,
      scores,
      shared,
    })),
    { query, passages: value },
  );
  showList(comparisons, order);
}

/** The passages by falling score; one is chosen and shown in detail. */
function showList(comparisons, order) {
  const highest = Object.fromEntries(
    Object.keys(comparisons[0].scores).map((kind) => [
      kind,
      Math.max(...comparisons.map(({ scores }) => scores[kind]), 1e-9),
    ]),
  );
  const buttons = comparisons.map((comparison) => passageButton(comparison, highest));
  const choose = (place) => {
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", i === place));
    showDetail(comparisons[place]);
  };
  buttons.forEach((button, place) => {
    button.onclick = () => choose(place);
  });
  byId("match-count").textContent =
    `${plural(comparisons.length, "passage")}, by ${SCORES[order]} score`;
  byId("match-list").replaceChildren(...buttons.map((button) => element("li", {}, button)));
  choose(0);
}

function passageButton({ passage, scores }, highest) {
  return element(
    "button",
    { type: "button", class: "passage" },
    element("span", { class: "passage-text" }, passage.text),
    element(
      "span",
      { class: "scores" },
      ...Object.keys(scores).map((kind) =>
        element(
          "span",
          { class: "score" },
          element("span", { class: "score-name" }, SCORES[kind]),
          " ",
          element("span", { class: "number" }, decimal(scores[kind])),
          element("span", {
            class: "meter",
            style: { "--share": Math.max(0, scores[kind] / highest[kind]) },
          }),
        ),
      ),
    ),
  );
}

function showDetail(joined) {
  const pieces = byId("match-pieces");
  pieces.onchange = () => showDetail(joined);
  const comparison = pieces.checked ? { ...joined, ...compare(joined.query, joined.passage, true) } : joined;
  const { scores, shared, tokens } = comparison;
  byId("match-scores").replaceChildren(
    ...Object.keys(scores).flatMap((kind) => [
      element("dt", {}, HEADLINES[kind]),
      element("dd", {}, decimal(scores[kind])),
    ]),
  );
  fillPart("match-ribbon", tokens && renderRibbon(comparison));
  fillPart("match-heat", tokens && renderHeatMap(tokens));
  fillPart("match-table", tokens && matchTable(comparison));
  fillPart("match-shared", shared && sharedTable(comparison));
}

/** Fills a part of the view, or hides it with its heading if it is empty. */
function fillPart(id, node) {
  byId(`${id}-part`).hidden = !node;
  byId(id).replaceChildren(...(node ? [node] : []));
}
