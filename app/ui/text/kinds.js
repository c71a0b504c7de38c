/** Compares the kinds of vectors: their number, size and time. */

import { element, numberCell, row } from "../core/dom.js";
import { bytes, count, milliseconds, plural } from "../core/format.js";

const FLOAT_BYTES = 4;
const SCALE_BYTES = 4;
const SPARSE_BYTES = 8; // A token's id and its weight, which stays float32.

/**
 * The meaning of each kind, and a function that describes the number and size of the vectors of all
 * texts.
 */
const KINDS = {
  dense: {
    name: "Dense",
    meaning: "the meaning as a whole",
    measure: (vectors) => matrixSizes(vectors),
  },
  sparse: {
    name: "Sparse",
    meaning: "the words that matter",
    measure(vectors) {
      const weights = vectors.reduce((sum, { indices }) => sum + indices.length, 0);
      const size = weights * SPARSE_BYTES;
      return { shape: plural(weights, "weight"), full: size, small: size };
    },
  },
  colbert: {
    name: "ColBERT",
    meaning: "one for each token",
    measure: (vectors) => matrixSizes(vectors),
  },
};
const ALL = { 2: "Both", 3: "All three" };

function matrixSizes(matrices) {
  const [{ width }] = matrices;
  const rows = matrices.reduce((sum, matrix) => sum + matrix.rows, 0);
  return {
    shape: `${plural(rows, "vector")} of ${count(width)}`,
    full: rows * width * FLOAT_BYTES,
    small: rows * (width + SCALE_BYTES),
  };
}

/** Fills a table's body; `times` has the milliseconds of `all` and of each kind once they are known. */
export function renderKinds(body, { kinds, makers }, texts, times) {
  const rows = kinds.map((kind) => ({
    ...KINDS[kind],
    ...KINDS[kind].measure(texts.map((text) => text[kind])),
    time: times[kind],
  }));
  const sum = (size) => rows.reduce((total, row) => total + row[size], 0);
  const total = {
    className: "total",
    name: ALL[kinds.length],
    meaning: makers.length > 1 ? "computed by each model" : "computed together",
    shape: "",
    full: sum("full"),
    small: sum("small"),
    time: times.all,
  };
  body.replaceChildren(...(rows.length > 1 ? [...rows, total] : rows).map(kindRow));
}

function kindRow({ className = "", name, meaning, shape, full, small, time }) {
  const filled = row([
    [name, element("small", {}, meaning)],
    shape,
    numberCell(bytes(full)),
    numberCell(bytes(small)),
    numberCell(time === undefined ? "…" : time === null ? "–" : milliseconds(time)),
  ]);
  filled.className = className;
  return filled;
}

/** The stages of the request as one bar. */
export function renderTimings(figure, timings) {
  const stages = [
    ["Tokenize", timings.tokenize],
    ["Queue", timings.queue],
    ["Inference", timings.inference],
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
