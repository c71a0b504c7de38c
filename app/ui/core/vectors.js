/** Scores of vectors: cosine, dot product of lexical weights, and late interaction (MaxSim). */

/** The dot product of `width` numbers of `a` from `i` and of `b` from `j`. */
export function dot(a, i, b, j, width) {
  let sum = 0;
  for (let k = 0; k < width; k++) sum += a[i + k] * b[j + k];
  return sum;
}

const norm = ({ values, width }, row = 0) =>
  Math.sqrt(dot(values, row * width, values, row * width, width));

/** The cosine of the first rows of two matrices. */
export function cosine(a, b) {
  const norms = norm(a) * norm(b);
  return norms ? dot(a.values, 0, b.values, 0, a.width) / norms : 0;
}

/** What both texts weigh: `[{id, query, passage, product}]`, the largest product first. */
export function sharedTerms(query, passage) {
  const weights = new Map(Array.from(passage.indices, (id, i) => [id, passage.values[i]]));
  return Array.from(query.indices, (id, i) => ({ id, query: query.values[i], passage: weights.get(id) }))
    .filter((term) => term.passage !== undefined)
    .map((term) => ({ ...term, product: term.query * term.passage }))
    .sort((a, b) => b.product - a.product);
}

/** The dot product of two sparse vectors. */
export const sparseScore = (query, passage) =>
  sharedTerms(query, passage).reduce((sum, term) => sum + term.product, 0);

/** The similarity of every row of `query` to every row of `passage`, row by row. */
export function similarities(query, passage) {
  const { width } = query;
  const found = new Float32Array(query.rows * passage.rows);
  for (let i = 0; i < query.rows; i++) {
    for (let j = 0; j < passage.rows; j++) {
      const product = dot(query.values, i * width, passage.values, j * width, width);
      found[i * passage.rows + j] = product * (passage.scales?.[j] ?? 1);
    }
  }
  return found;
}

/** For each query token its best passage token: `[{column, value}]`. */
export function bestMatches(matrix, rows, columns) {
  return Array.from({ length: rows }, (_, row) => {
    const line = matrix.subarray(row * columns, (row + 1) * columns);
    const column = line.reduce((best, value, j) => (value > line[best] ? j : best), 0);
    return { column, value: line[column] };
  });
}

/** ColBERT's score, as the service computes it: the mean of the best similarities. */
export function maxSim(query, passage) {
  const { width, rows } = query;
  let sum = 0;
  for (let i = 0; i < rows; i++) {
    let best = -Infinity;
    for (let j = 0; j < passage.rows; j++) {
      const product = dot(query.values, i * width, passage.values, j * width, width);
      const value = product * (passage.scales ? passage.scales[j] : 1);
      if (value > best) best = value;
    }
    sum += best;
  }
  return rows && passage.rows ? sum / rows : 0;
}
