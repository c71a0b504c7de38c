/** A query against one passage: everything that the views show of a pair. */

import { piecesOf, plainTokens, colbertTokens } from "../core/tokens.js";
import { bestMatches, cosine, sharedTerms, similarities } from "../core/vectors.js";

const END = "end";

/** A text as the models see it: its tokens and its vectors. */
export const readText = (text, tokens, vectors) => ({ text, tokens, vectors });

/**
 * Scores and similarities of two texts. `matrix` has a row for each of `queryLabels` and a column
 * for each of `passageLabels`; `best` is the best column of each row. The end of a text, a special
 * token, has a vector too.
 */
export function compare(query, passage) {
  const rows = query.vectors.colbert.rows;
  const columns = passage.vectors.colbert.rows;
  const matrix = similarities(query.vectors.colbert, passage.vectors.colbert);
  const best = bestMatches(matrix, rows, columns);
  const shared = sharedTerms(query.vectors.sparse, passage.vectors.sparse);
  const texts = new Map(
    plainTokens(query.tokens).map(({ id, text }) => [id, text.trim().toLowerCase()]),
  );
  return {
    query,
    passage,
    matrix,
    rows,
    columns,
    best,
    shared: shared.map((term) => ({ ...term, text: texts.get(term.id) ?? `token ${term.id}` })),
    queryLabels: labels(query, rows),
    passageLabels: labels(passage, columns),
    pieces: piecesOf(passage.text, passage.tokens),
    scores: {
      dense: cosine(query.vectors.dense, passage.vectors.dense),
      sparse: shared.reduce((sum, term) => sum + term.product, 0),
      colbert: best.reduce((sum, { value }) => sum + value, 0) / rows,
    },
  };
}

const labels = ({ tokens }, rows) =>
  colbertTokens(tokens, rows).map((token) => (token.special ? END : token.text.trim()));
