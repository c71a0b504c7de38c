/** The numbers of a comparison as tables. */

import { element, numberCell, row, table } from "../core/dom.js";
import { decimal } from "../core/format.js";

/** The lexical weights that query and passage share. */
export function sharedTable({ shared, scores }) {
  if (!shared.length) {
    return element(
      "p",
      { class: "quiet" },
      "They share no word with a weight: only the meaning can match.",
    );
  }
  const numbers = (...values) => values.map((value) => numberCell(decimal(value)));
  const sum = row(["Sparse score", element("td", { colspan: 2 }), ...numbers(scores.sparse)]);
  return table(
    { class: "shared-terms" },
    ["Shared token", "Query", "Passage", "Product"],
    shared.map(({ text, query, passage, product }) => [text, ...numbers(query, passage, product)]),
    element("tfoot", {}, sum),
  );
}

/** The best match of each query token. */
export function matchTable({ tokens: { queryLabels, passageLabels, best }, scores }) {
  const mean = row(["ColBERT score, the mean", "", numberCell(decimal(scores.colbert))]);
  return table(
    { class: "best-matches" },
    ["Query token", "Best match", "Similarity"],
    best.map(({ column, value }, i) => [
      queryLabels[i],
      passageLabels[column],
      numberCell(decimal(value)),
    ]),
    element("tfoot", {}, mean),
  );
}
