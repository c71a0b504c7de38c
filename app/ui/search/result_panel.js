/** The lower part of the view Search: a query, five rankings, and why the chosen passage is found. */

import { embed, embedQuery, rerank, tokenize } from "../core/api.js";
import { byId, element, onPause } from "../core/dom.js";
import { milliseconds } from "../core/format.js";
import { LatestWork, sentenceFor } from "../core/work.js";
import { compare, readText } from "../match/compare.js";
import { renderRibbon } from "../match/ribbon.js";
import { sharedTable } from "../match/tables.js";
import { Columns } from "./columns.js";
import { fuse } from "./ranking.js";

const PAUSE = 300;
const CANDIDATES = 100;
const RERANKED = 20;

export class ResultPanel {
  #index;
  #status;
  #texts = [];
  #query = null;
  #tokens = new Map();
  #work;
  #detail;
  #columns;

  constructor(index, status) {
    this.#index = index;
    this.#status = status;
    this.#work = new LatestWork(byId("search-message"), status);
    this.#detail = new LatestWork(byId("why-message"), status);
    this.#columns = new Columns((chunk) =>
      this.#detail.run((signal) => this.#explain(chunk, signal)),
    );
    onPause(byId("search-query"), "input", PAUSE, () => this.#run());
  }

  /** Searches these texts, which are in the index, from now on. */
  search(texts) {
    this.#texts = texts;
    this.#tokens.clear();
    this.#run();
  }

  #run() {
    const query = byId("search-query").value.trim();
    byId("search-output").hidden = !query || !this.#texts.length;
    if (query && this.#texts.length) this.#work.run((signal) => this.#rank(query, signal));
  }

  async #rank(query, signal) {
    const health = await this.#status.known();
    const times = new Stopwatch();
    const [asked, [tokens]] = await Promise.all([
      embedQuery(query, health, { signal }),
      tokenize([query], health, { signal }),
    ]);
    const embedding = times.lap();
    const [vectors] = asked.texts;
    const found = await this.#index.search(vectors, CANDIDATES);
    if (signal.aborted) return;
    const scoring = times.lap();
    this.#query = readText(query, tokens, vectors);
    const rankings = { ...found, fused: fuse(Object.values(found), CANDIDATES), reranked: null };
    await this.#show(rankings, health, signal);
    times.lap();
    const reason = await this.#rerank(query, rankings, signal);
    const reranking = times.lap();
    await this.#show(rankings, health, signal, reason);
    const [best] = rankings.reranked ?? rankings.fused;
    if (best) this.#columns.choose(best.chunk);
    byId("search-times").textContent =
      `Query embedded in ${embedding}, all passages scored in ${scoring}` +
      (rankings.reranked ? `, ${rankings.reranked.length} reranked in ${reranking}` : "");
  }

  /** Fills the column of the reranked; why it cannot be filled, if so. */
  async #rerank(query, rankings, signal) {
    const candidates = rankings.fused.slice(0, RERANKED).map((hit) => hit.chunk);
    if (!candidates.length) return "";
    try {
      const { results } = await rerank(
        query,
        candidates.map((chunk) => this.#texts[chunk]),
        { signal },
      );
      rankings.reranked = results.map(({ index, score }) => ({ chunk: candidates[index], score }));
      return "";
    } catch (error) {
      if (signal.aborted) throw error;
      return sentenceFor(error);
    }
  }

  async #show(rankings, health, signal, reason = "") {
    const unknown = Columns.shown(rankings).filter((chunk) => !this.#tokens.has(chunk));
    if (unknown.length) {
      const tokens = await tokenize(
        unknown.map((chunk) => this.#texts[chunk]),
        health,
        { signal },
      );
      unknown.forEach((chunk, i) => this.#tokens.set(chunk, tokens[i]));
    }
    const { indices, values } = this.#query.vectors.sparse;
    const terms = new Map(Array.from(indices, (id, i) => [id, values[i]]));
    this.#columns.show(rankings, { texts: this.#texts, tokens: this.#tokens, terms, reason });
  }

  /** Which words did it: the passage with all of its vectors, which the index may have joined. */
  async #explain(chunk, signal) {
    const text = this.#texts[chunk];
    const {
      texts: [vectors],
    } = await embed([text], {}, { signal });
    const comparison = compare(this.#query, readText(text, this.#tokens.get(chunk), vectors));
    byId("why-title").textContent = `Which words did it: passage #${chunk + 1}`;
    byId("why").replaceChildren(
      renderRibbon(comparison),
      element(
        "div",
        { class: "scroll", tabindex: "0", role: "region", "aria-label": "Shared tokens" },
        sharedTable(comparison),
      ),
    );
  }
}

/** Tells how long each step took. */
class Stopwatch {
  #since = performance.now();

  /** The time since the last call, as text. */
  lap() {
    const before = this.#since;
    this.#since = performance.now();
    return milliseconds(this.#since - before);
  }
}
