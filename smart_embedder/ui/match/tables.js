/** The numbers of a comparison as tables. */

import { element, numberCell } from "../core/dom.js";
import { decimal } from "../core/format.js";

const head = (...texts) =>
  element(
    "thead",
    {},
    element("tr", {}, ...texts.map((text) => element("th", { scope: "col" }, text))),
  );

const rowHead = (text) => element("th", { scope: "row" }, text);

/** The lexical weights that query and passage share. */
export function sharedTable({ shared, scores }) {
  if (!shared.length) {
    return element(
      "p",
      { class: "quiet" },
      "They share no word with a weight: only the meaning can match.",
    );
  }
  return element(
    "table",
    { class: "shared-terms" },
    head("Shared token", "Query", "Passage", "Product"),
    element(
      "tbody",
      {},
      ...shared.map((term) =>
        element(
          "tr",
          {},
          rowHead(term.text),
          numberCell(decimal(term.query)),
          numberCell(decimal(term.passage)),
          numberCell(decimal(term.product)),
        ),
      ),
    ),
    element(
      "tfoot",
      {},
      element(
        "tr",
        {},
        rowHead("Sparse score"),
        element("td", { colspan: 2 }),
        numberCell(decimal(scores.sparse)),
      ),
    ),
  );
}

/** The best match of each query token. */
export function matchTable({ tokens: { queryLabels, passageLabels, best }, scores }) {
  return element(
    "table",
    { class: "best-matches" },
    head("Query token", "Best match", "Similarity"),
    element(
      "tbody",
      {},
      ...best.map(({ column, value }, row) =>
        element(
          "tr",
          {},
          rowHead(queryLabels[row]),
          element("td", {}, passageLabels[column]),
          numberCell(decimal(value)),
        ),
      ),
    ),
    element(
      "tfoot",
      {},
      element(
        "tr",
        {},
        rowHead("ColBERT score, the mean"),
        element("td"),
        numberCell(decimal(scores.colbert)),
      ),
    ),
  );
}
