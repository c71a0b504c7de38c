/** A worker that holds the vectors of all passages and scores them, so that the page stays smooth. */

import { decodeEmbeddings } from "../core/embeddings.js";
import { cosine, maxSim, sparseScore } from "../core/vectors.js";
import { rank } from "./ranking.js";

/** By the number of the passage; a place is empty until its vectors have come. */
let passages = [];
let bytes = 0;

const SCORES = { dense: cosine, sparse: sparseScore, colbert: maxSim };

const jobs = {
  clear() {
    passages = [];
    bytes = 0;
  },

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
      const scores = new Float32Array(passages.length).fill(-Infinity);
      passages.forEach((passage, chunk) => {
        scores[chunk] = SCORES[kind](query[kind], passage[kind]);
      });
      const hits = rank(scores, limit, { positive: kind === "sparse" });
      return hits.filter((hit) => hit.score > -Infinity);
    };
    const kinds = Object.keys(SCORES).filter((kind) => query[kind]);
    return Object.fromEntries(kinds.map((kind) => [kind, best(kind)]));
  },
};

addEventListener("message", ({ data: { id, job, ...arguments_ } }) => {
  try {
    postMessage({ id, result: jobs[job](arguments_) });
  } catch (error) {
    postMessage({ id, error: error.message });
  }
});
