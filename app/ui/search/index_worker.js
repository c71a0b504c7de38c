/** A worker that holds the vectors of all passages and scores them, so that the page stays smooth. */

import { decodeEmbeddings } from "../core/embeddings.js";
import { cosine, maxSim, sparseScore } from "../core/vectors.js";
import { rank } from "./ranking.js";

/** By the number of the passage; a place is empty until its vectors have come. */
const passages = [];
let bytes = 0;

const SCORES = { dense: cosine, sparse: sparseScore, colbert: maxSim };
/** Milliseconds for which something is repeated to be timed, because clocks of browsers are coarse. */
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
  /** Adds the answer of /embeddings for the passages from number `first` on. */
  add({ first, buffer }) {
    decodeEmbeddings(buffer).texts.forEach((text, i) => {
      passages[first + i] = text;
    });
    bytes += buffer.byteLength;
    return { bytes };
  },

  /** The best `limit` passages for each kind of vector that the query has. */
  search({ query, limit }) {
    const best = (kind) => {
      const hits = rank(scoresOf(query, kind), limit, { positive: kind === "sparse" });
      return hits.filter((hit) => hit.score > -Infinity);
    };
    return Object.fromEntries(kindsOf(query).map((kind) => [kind, best(kind)]));
  },

  /** How large the vectors of each kind are, and how long all passages take to be scored by it. */
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
