/** The numbers of a comparison as tables. */

import { element, numberCell, row, table } from "../core/dom.js";
import { decimal, shortened } from "../core/format.js";

/** The lexical weights that query and passage share. */
export function sharedTable({ shared, scores }) {
  if (!shared.length) {
    return element(
      "p",
      { class: "quiet" },
      "The texts share no word with a weight. Only the meaning can match.",
    );
  }
  const numbers = (...values) => values.map((value) => numberCell(decimal(value)));
  const sum = row(["Sparse score", element("td", { colspan: 2 }), ...numbers(scores.sparse)]);
  return table(
    { class: "shared-terms" },
    ["Word", "Query", "Passage", "Adds to the score"],
    shared.map(({ text, query, passage, product }) => [shortened(text), ...numbers(query, passage, product)]),
    element("tfoot", {}, sum),
  );
}

/** The best match of each part of the query. */
export function matchTable({ tokens: { queryLabels, passageLabels, best }, scores }) {
  const mean = row(["ColBERT score, the mean over all tokens of the query", "", numberCell(decimal(scores.colbert))]);
  return table(
    { class: "best-matches" },
    ["Query", "Best match", "Similarity"],
    best.map(({ column, value }, i) => [
      shortened(queryLabels[i]),
      shortened(passageLabels[column]),
      numberCell(decimal(value)),
    ]),
    element("tfoot", {}, mean),
  );
}
