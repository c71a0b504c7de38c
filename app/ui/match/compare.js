/** Compares a query with a passage, for the views that show the pair. */

import { bare, idsOf, piecesOf, placesOf, plainTokens, wordsOf } from "../core/tokens.js";
import { bestMatches, cosine, sharedTerms, similarities } from "../core/vectors.js";

/** The label of special tokens, such as markers and the end, when words are shown. */
const SPECIAL = "special tokens";

/** A text as the models see it: its tokens and its vectors. */
export const readText = (text, tokens, vectors) => ({ text, tokens, vectors });

/**
 * The scores of two texts, by the kinds of vectors that both have, and their parts: `shared` has the
 * sparse terms of both, `tokens` the parts that ColBERT compares, in words or in pieces; either is
 * null if there are none. The scores are always computed from tokens.
 */
export function compare(query, passage, isPieces = false) {
  const scores = {};
  if (query.vectors.dense) scores.dense = cosine(query.vectors.dense, passage.vectors.dense);
  const shared = query.vectors.sparse && sharedOf(query, passage, isPieces);
  if (shared) scores.sparse = shared.reduce((sum, term) => sum + term.product, 0);
  const tokens = query.vectors.colbert && tokensOf(query, passage, isPieces);
  if (tokens) scores.colbert = tokens.score;
  return { query, passage, scores, shared, tokens };
}

/**
 * The terms with their texts; terms that a model added to the query have their token strings. The
 * terms of a word that is in both texts are added up to one.
 */
function sharedOf({ text, tokens, vectors }, passage, isPieces) {
  const { indices } = vectors.sparse;
  const texts = new Map(
    Array.from(indices, (id, i) => [id, bare(vectors.strings?.sparse[i] ?? `token ${id}`)]),
  );
  const plain = plainTokens(tokens);
  for (const { id, text: piece } of plain) texts.set(id, piece.trim().toLowerCase());
  const terms = new Map(
    sharedTerms(vectors.sparse, passage.vectors.sparse).map((term) => [term.id, term]),
  );
  const joined = isPieces ? [] : joinShared(terms, wordsOf(text, tokens), plain, passage);
  const rest = [...terms.values()].map((term) => ({ ...term, text: texts.get(term.id) }));
  return [...joined, ...rest].sort((a, b) => b.product - a.product);
}

/** Removes the terms of shared words from `terms`, and returns them added up by word. */
function joinShared(terms, words, plain, passage) {
  const other = plainTokens(passage.tokens);
  const found = new Set(
    wordsOf(passage.text, passage.tokens).map((word) => idsOf(other, word).join()),
  );
  const joined = [];
  for (const word of words.filter(({ tokens }) => tokens.length > 1)) {
    const ids = idsOf(plain, word);
    const parts = found.has(ids.join()) ? ids.filter((id) => terms.has(id)) : [];
    if (!parts.length) continue;
    const sum = (part) => parts.reduce((total, id) => total + terms.get(id)[part], 0);
    const sums = { query: sum("query"), passage: sum("passage"), product: sum("product") };
    joined.push({ ...sums, text: word.text.trim().toLowerCase() });
    for (const id of parts) terms.delete(id);
  }
  return joined;
}

/**
 * `matrix` has a row for each of `queryLabels` and a column for each of `passageLabels`; `best` has
 * the best column of each row. `queryPlaces` and `places` have the index of the token of each row and
 * column, for a word that of its last token; null for special tokens. The similarity of two words is
 * the mean, over the tokens of the query's word, of the best similarity.
 */
function tokensOf(query, passage, isPieces) {
  const [asked, found] = [query.vectors.colbert, passage.vectors.colbert];
  const matrix = similarities(asked, found);
  const best = bestMatches(matrix, asked.rows, found.rows);
  const [rows, columns] = [query, passage].map((text) => partsOf(text, isPieces));
  const joined = Float32Array.from({ length: rows.length * columns.length }, (_, i) => {
    const row = rows[Math.floor(i / columns.length)];
    const column = columns[i % columns.length];
    const matches = row.vectors.map((vector) =>
      column.vectors.reduce((most, j) => Math.max(most, matrix[vector * found.rows + j]), -1),
    );
    return matches.reduce((sum, value) => sum + value, 0) / matches.length;
  });
  return {
    matrix: joined,
    rows: rows.length,
    columns: columns.length,
    best: bestMatches(joined, rows.length, columns.length),
    score: best.reduce((sum, { value }) => sum + value, 0) / asked.rows,
    queryLabels: rows.map(({ label }) => label),
    passageLabels: columns.map(({ label }) => label),
    queryPlaces: rows.map(({ place }) => place),
    places: columns.map(({ place }) => place),
    isPieces,
    pieces: (isPieces ? piecesOf : wordsOf)(passage.text, passage.tokens),
  };
}

/**
 * The tokens or words of a text's ColBERT vectors: `{label, vectors, place}`. With tokens, special ones
 * are shown by their token strings; with words, they are one part at the end.
 */
function partsOf({ text, tokens, vectors }, isPieces) {
  const plain = plainTokens(tokens);
  const words = isPieces ? [] : wordsOf(text, tokens);
  const wordOf = new Map(words.flatMap((word) => word.tokens.map((place) => [place, word])));
  const parts = new Map();
  placesOf(vectors.strings.colbert, tokens).forEach((place, vector) => {
    const word = wordOf.get(place);
    const key = word ?? (isPieces ? vector : SPECIAL);
    const text = word?.text ?? plain[place]?.text ?? bare(vectors.strings.colbert[vector]);
    const label = key === SPECIAL ? SPECIAL : text.trim();
    const part = parts.get(key) ?? { label, vectors: [] };
    part.vectors.push(vector);
    part.place = place;
    parts.set(key, part);
  });
  const inOrder = [...parts.values()];
  return isPieces ? inOrder : inOrder.toSorted((a, b) => (a.place === null) - (b.place === null));
}
