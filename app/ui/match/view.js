/** The view Match: how a query meets passages, word by word. */

import { embed, embedQuery, tokenize } from "../core/api.js";
import { byId, element, onPause } from "../core/dom.js";
import { decimal, plural } from "../core/format.js";
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

export function createMatchView(status) {
  const [query, passages] = [byId("match-query"), byId("match-passages")];
  const work = new LatestWork(byId("match-message"), status);
  const run = () => work.run((signal) => match(query.value.trim(), passages.value, status, signal));
  let began = false;

  onPause(query, "input", PAUSE, run);
  onPause(passages, "input", PAUSE, run);
  return {
    show() {
      if (began) return;
      began = true;
      query.value ||= QUERY;
      passages.value ||= PASSAGES;
      run();
    },
  };
}

async function match(query, value, status, signal) {
  const texts = splitTexts(value).slice(0, MOST_PASSAGES);
  byId("match-output").hidden = !query || !texts.length;
  if (!query || !texts.length) return;
  const health = await status.known();
  const [asked, found, [queryTokens, ...tokens]] = await Promise.all([
    embedQuery(query, health, { signal }),
    embed(texts, {}, { signal }),
    tokenize([query, ...texts], health, { signal }),
  ]);
  const read = readText(query, queryTokens, asked.texts[0]);
  const comparisons = texts
    .map((text, i) => compare(read, readText(text, tokens[i], found.texts[i])))
    .sort((a, b) => b.scores.colbert - a.scores.colbert);
  showList(comparisons);
}

/** The passages by falling ColBERT score; one is chosen and shown in detail. */
function showList(comparisons) {
  const highest = Object.fromEntries(
    Object.keys(SCORES).map((kind) => [
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
    `${plural(comparisons.length, "passage")}, the best ColBERT score first`;
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
      ...Object.entries(SCORES).map(([kind, name]) =>
        element(
          "span",
          { class: "score" },
          element("span", { class: "score-name" }, name),
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

function showDetail(comparison) {
  byId("match-scores").replaceChildren(
    ...Object.entries({
      dense: "Dense cosine",
      sparse: "Sparse dot product",
      colbert: "ColBERT, mean of the best",
    }).flatMap(([kind, name]) => [
      element("dt", {}, name),
      element("dd", {}, decimal(comparison.scores[kind])),
    ]),
  );
  byId("match-ribbon").replaceChildren(renderRibbon(comparison));
  byId("match-heat").replaceChildren(renderHeatMap(comparison));
  byId("match-shared").replaceChildren(sharedTable(comparison));
  byId("match-table").replaceChildren(matchTable(comparison));
}
