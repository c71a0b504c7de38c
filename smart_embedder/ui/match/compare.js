/** A query against one passage: everything that the views show of a pair. */

import { bare, piecesOf, placesOf, plainTokens } from "../core/tokens.js";
import { bestMatches, cosine, sharedTerms, similarities } from "../core/vectors.js";

/** A text as the models see it: its tokens and its vectors. */
export const readText = (text, tokens, vectors) => ({ text, tokens, vectors });

/**
 * Scores of two texts by the kinds of vectors that both have, and what they are made of. `shared`
 * are the sparse terms of both, and `tokens` what ColBERT compares; null where there are none.
 */
export function compare(query, passage) {
  const scores = {};
  if (query.vectors.dense) scores.dense = cosine(query.vectors.dense, passage.vectors.dense);
  const shared = query.vectors.sparse && sharedOf(query, passage);
  if (shared) scores.sparse = shared.reduce((sum, term) => sum + term.product, 0);
  const tokens = query.vectors.colbert && tokensOf(query, passage);
  if (tokens)
    scores.colbert = tokens.best.reduce((sum, { value }) => sum + value, 0) / tokens.rows;
  return { query, passage, scores, shared, tokens };
}

/** The terms with their texts; those that a model added to the query are named by its vocabulary. */
function sharedOf({ tokens, vectors }, passage) {
  const { indices } = vectors.sparse;
  const texts = new Map(
    Array.from(indices, (id, i) => [id, bare(vectors.strings?.sparse[i] ?? `token ${id}`)]),
  );
  for (const { id, text } of plainTokens(tokens)) texts.set(id, text.trim().toLowerCase());
  return sharedTerms(vectors.sparse, passage.vectors.sparse).map((term) => ({
    ...term,
    text: texts.get(term.id),
  }));
}

/**
 * `matrix` has a row for each of `queryLabels` and a column for each of `passageLabels`; `best` is
 * the best column of each row. `places` says for each column which token of the passage it is.
 */
function tokensOf(query, passage) {
  const [asked, found] = [query.vectors.colbert, passage.vectors.colbert];
  const matrix = similarities(asked, found);
  const [read, places] = [query, passage].map(({ tokens, vectors }) =>
    placesOf(vectors.strings.colbert, tokens),
  );
  return {
    matrix,
    rows: asked.rows,
    columns: found.rows,
    best: bestMatches(matrix, asked.rows, found.rows),
    queryLabels: labelsOf(query, read),
    passageLabels: labelsOf(passage, places),
    places,
    pieces: piecesOf(passage.text, passage.tokens),
  };
}

/** What is no part of a text has its vocabulary's string, but for the end, which has a vector too. */
function labelsOf({ tokens, vectors }, places) {
  const plain = plainTokens(tokens);
  const end = tokens.at(-1)?.special ? tokens.at(-1).text : null;
  return vectors.strings.colbert.map((string, i) => {
    if (places[i] !== null) return plain[places[i]].text.trim();
    return string === end ? "end" : bare(string);
  });
}
