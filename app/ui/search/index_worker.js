/** A worker that holds the vectors of all passages and scores them without blocking the page. */

import { decodeEmbeddings } from "../core/embeddings.js";
import { cosine, maxSim, sparseScore } from "../core/vectors.js";
import { rank } from "./ranking.js";

/** The vectors by the number of the passage; empty until they arrive. */
const passages = [];
let bytes = 0;

const SCORES = { dense: cosine, sparse: sparseScore, colbert: maxSim };
/** Work is repeated for this many milliseconds to be timed, because browsers have coarse clocks. */
const TIMED = 20;

const kindsOf = (query) => Object.keys(SCORES).filter((kind) => query[kind]);

function scoresOf(query, kind) {
  const scores = new Float32Array(passages.length).fill(-Infinity);
  passages.forEach((passage, chunk) => {
    scores[chunk] = SCORES[kind](query[kind], passage[kind]);
  });
  return scores;
}

function timed(run) {
  const began = performance.now();
  let [times, passed] = [0, 0];
  for (; passed < TIMED; times++, passed = performance.now() - began) run();
  return passed / times;
}

const jobs = {
  /** Adds the response of /embeddings for the passages from number `first` on. */
  add({ first, buffer }) {
    decodeEmbeddings(buffer).texts.forEach((text, i) => {
      passages[first + i] = text;
    });
    bytes += buffer.byteLength;
    return { bytes };
  },

  /** The best `limit` passages by each kind of vector that the query has. */
  search({ query, limit }) {
    const best = (kind) => {
      const hits = rank(scoresOf(query, kind), limit, { positive: kind === "sparse" });
      return hits.filter((hit) => hit.score > -Infinity);
    };
    return Object.fromEntries(kindsOf(query).map((kind) => [kind, best(kind)]));
  },

  /** The size of the vectors of each kind, and the time to score all passages with it. */
  measure({ query }) {
    const sum = (kind, of) => passages.reduce((total, passage) => total + of(passage[kind]), 0);
    const measured = kindsOf(query).map((kind) => {
      const [bytes, vectors] = [sum(kind, (made) => made.bytes), sum(kind, ({ rows = 1 }) => rows)];
      return [kind, { bytes, vectors, milliseconds: timed(() => scoresOf(query, kind)) }];
    });
    return Object.fromEntries(measured);
  },
};

addEventListener("message", ({ data: { id, job, ...arguments_ } }) => {
  try {
    postMessage({ id, result: jobs[job](arguments_) });
  } catch (error) {
    postMessage({ id, error: error.message });
  }
});
