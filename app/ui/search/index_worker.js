/** A worker that holds the vectors of all passages and scores them, so that the page stays smooth. */

import { decodeEmbeddings } from "../core/embeddings.js";
import { cosine, maxSim, sparseScore } from "../core/vectors.js";
import { rank } from "./ranking.js";

/** By the number of the passage; a place is empty until its vectors have come. */
let passages = [];
let bytes = 0;

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

  /** The best `limit` passages for each kind of vector. */
  search({ query, limit }) {
    const score = (kind, of) => {
      const scores = new Float32Array(passages.length).fill(-Infinity);
      passages.forEach((passage, chunk) => {
        scores[chunk] = of(query[kind], passage[kind]);
      });
      return scores;
    };
    const best = (scores, options) =>
      rank(scores, limit, options).filter((hit) => hit.score > -Infinity);
    return {
      dense: best(score("dense", cosine)),
      sparse: best(score("sparse", sparseScore), { positive: true }),
      colbert: best(score("colbert", maxSim)),
    };
  },
};

addEventListener("message", ({ data: { id, job, ...arguments_ } }) => {
  try {
    postMessage({ id, result: jobs[job](arguments_) });
  } catch (error) {
    postMessage({ id, error: error.message });
  }
});
