/** Rankings: the best of many scores, and the fusion of several rankings. */

/** The number of hits of each ranking that are fused and compared. */
export const CANDIDATES = 100;
/** The weights of the kinds in the fusion: a poor lexical ranking must not spoil a good one. */
export const WEIGHTS = { dense: 3, sparse: 1, colbert: 3 };

/** The best `limit` of `scores` as `[{chunk, score}]`; equal scores keep the order of the text. */
export function rank(scores, limit, { positive = false } = {}) {
  return Array.from(scores, (score, chunk) => ({ chunk, score }))
    .filter(({ score }) => !positive || score > 0)
    .sort((a, b) => b.score - a.score || a.chunk - b.chunk)
    .slice(0, limit);
}

/** Reciprocal rank fusion: the ranking by each kind adds weight / rank to what it contains. */
export function fuse(found, limit) {
  const scores = new Map();
  for (const [kind, ranking] of Object.entries(found)) {
    ranking.forEach(({ chunk }, place) => {
      scores.set(chunk, (scores.get(chunk) ?? 0) + WEIGHTS[kind] / (place + 1));
    });
  }
  return [...scores]
    .map(([chunk, score]) => ({ chunk, score }))
    .sort((a, b) => b.score - a.score || a.chunk - b.chunk)
    .slice(0, limit);
}

/** The rankings by all kinds of vectors as one; `searchProgram` writes the same for Qdrant. */
export function merge(found) {
  const rankings = Object.values(found);
  return rankings.length > 1 ? fuse(found, CANDIDATES) : rankings[0];
}

/**
 * How two rankings differ: `placeIn[i]` maps passages to their ranks, from 1, in ranking `i`. Of the
 * first `rows` of both, `shared` are in both, and `still` have the same rank.
 */
export function compareRankings(rankings, rows) {
  const placeIn = rankings.map((hits) => new Map(hits.map(({ chunk }, i) => [chunk, i + 1])));
  const [before, after] = placeIn;
  const shared = rankings[1].slice(0, rows).filter(({ chunk }) => before.get(chunk) <= rows);
  const still = shared.filter(({ chunk }) => before.get(chunk) === after.get(chunk));
  return { placeIn, shared: shared.length, still: still.length };
}
