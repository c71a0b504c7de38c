/** Rankings: the best of many scores, and the fusion of several rankings. */

/** The constant of reciprocal rank fusion, as in the paper and in most engines. */
const RRF_CONSTANT = 60;

/** The best `limit` of `scores` as `[{chunk, score}]`; equal scores keep the order of the text. */
export function rank(scores, limit, { positive = false } = {}) {
  return Array.from(scores, (score, chunk) => ({ chunk, score }))
    .filter(({ score }) => !positive || score > 0)
    .sort((a, b) => b.score - a.score || a.chunk - b.chunk)
    .slice(0, limit);
}

/** Reciprocal rank fusion: each ranking adds 1 / (60 + rank) to what it contains. */
export function fuse(rankings, limit) {
  const scores = new Map();
  for (const ranking of rankings) {
    ranking.forEach(({ chunk }, place) => {
      scores.set(chunk, (scores.get(chunk) ?? 0) + 1 / (RRF_CONSTANT + place + 1));
    });
  }
  return [...scores]
    .map(([chunk, score]) => ({ chunk, score }))
    .sort((a, b) => b.score - a.score || a.chunk - b.chunk)
    .slice(0, limit);
}
