/** The three kinds of vectors side by side: how many, how large, how long they took. */

import { element, numberCell } from "../core/dom.js";
import { bytes, count, milliseconds, plural } from "../core/format.js";

const FLOAT_BYTES = 4;
const SCALE_BYTES = 4;
const SPARSE_BYTES = 8; // A token's id and its weight, which stays float32.

/** Fills a table's body; `times` has the milliseconds of `all` and of each kind once they are known. */
export function renderKinds(body, texts, times) {
  const sum = (size) => texts.reduce((total, text) => total + size(text), 0);
  const width = texts[0].dense.width;
  const vectors = sum((text) => text.colbert.rows);
  const weights = sum((text) => text.sparse.indices.length);
  const dense = (each) => texts.length * each;
  const rows = [
    [
      "Dense",
      "the meaning, as a whole",
      `${plural(texts.length, "vector")} of ${count(width)}`,
      dense(width * FLOAT_BYTES),
      dense(width + SCALE_BYTES),
      times.dense,
    ],
    [
      "Sparse",
      "the words that count",
      plural(weights, "weight"),
      weights * SPARSE_BYTES,
      weights * SPARSE_BYTES,
      times.sparse,
    ],
    [
      "ColBERT",
      "each token in its context",
      `${plural(vectors, "vector")} of ${count(texts[0].colbert.width)}`,
      vectors * texts[0].colbert.width * FLOAT_BYTES,
      vectors * (texts[0].colbert.width + SCALE_BYTES),
      times.colbert,
    ],
  ];
  const total = rows.reduce((sums, row) => [sums[0] + row[3], sums[1] + row[4]], [0, 0]);
  body.replaceChildren(
    ...rows.map((row) => kindRow("", ...row)),
    kindRow("total", "All three", "from one forward pass", "", ...total, times.all),
  );
}

function kindRow(className, name, meaning, shape, full, small, time) {
  return element(
    "tr",
    { class: className },
    element("th", { scope: "row" }, name, element("small", {}, meaning)),
    element("td", {}, shape),
    numberCell(bytes(full)),
    numberCell(bytes(small)),
    numberCell(time === undefined ? "…" : milliseconds(time)),
  );
}

/** The stages of the request as one bar. */
export function renderTimings(figure, timings) {
  const stages = [
    ["Tokenise", timings.tokenize],
    ["Wait", timings.queue],
    ["Forward", timings.inference],
  ];
  figure.replaceChildren(
    element(
      "div",
      { class: "stages" },
      ...stages.map(([, time], i) =>
        element("span", { class: `stage stage-${i}`, style: { "--share": Math.max(time, 0.01) } }),
      ),
    ),
    element(
      "figcaption",
      {},
      ...stages.map(([name, time], i) =>
        element("span", { class: `key key-${i}` }, `${name} ${milliseconds(time)}`),
      ),
    ),
  );
}
