/** The lower part of the view Search: a query, its rankings, and the matches of a passage. */

import {
  embed,
  embedRequest,
  named,
  readAs,
  rerank,
  rerankRequest,
  tokenize,
  withTokens,
} from "../core/api.js";
import { byId, element, onPause } from "../core/dom.js";
import { milliseconds, plural } from "../core/format.js";
import { showLead } from "../core/lead.js";
import { TakeBar } from "../core/take.js";
import { LatestWork, sentenceFor } from "../core/work.js";
import { compare, readText } from "../match/compare.js";
import { renderRibbon } from "../match/ribbon.js";
import { sharedTable } from "../match/tables.js";
import { Columns, ROWS } from "./columns.js";
import { ComparisonPanel } from "./comparison.js";
import { lettersOf, nameOf } from "./passages.js";
import { inputOf, pictureOf } from "./pictures.js";
import { searchProgram } from "./program.js";
import { CANDIDATES, merge } from "./ranking.js";
import { CORPUS } from "./samples.js";

const PAUSE = 300;
const RERANKED = 20;
/** The pictures in a request for scores: in base64, they fit into the service's default limit. */
const MOST_BYTES = 12_000_000;
const HEIGHT = 360;
const LOST = {
  dense: "no ranking by meaning",
  sparse: "no ranking by words",
  colbert: "no ranking by words in context",
};

export class ResultPanel {
  #index = null;
  #models;
  /** The passages in the index, and the model that made their vectors. */
  #passages = [];
  #model = null;
  /** The text of the passages; null for files. */
  #text = null;
  #query = null;
  #tokens = new Map();
  #work;
  #detail;
  #columns;
  #comparison;
  #bar;

  constructor(models) {
    this.#models = models;
    this.#work = new LatestWork(byId("search-message"), models.status);
    this.#detail = new LatestWork(byId("why-message"), models.status);
    this.#columns = new Columns(byId("columns"), (chunk) =>
      this.#detail.run((signal) => this.#explain(chunk, signal)),
    );
    this.#comparison = new ComparisonPanel(models, (chunk) => this.#columns.choose(chunk));
    this.#bar = new TakeBar("search", models);
    onPause(byId("search-query"), "input", PAUSE, () => this.again());
    byId("search-samples").onclick = ({ target }) => {
      if (target.type !== "button") return;
      byId("search-query").value = target.textContent;
      this.again();
    };
  }

  /** Searches this index of passages, made by `model`, from now on, and closes the previous one. */
  search(index, passages, model, text) {
    const before = this.#index;
    this.#index = index;
    this.#passages = passages;
    this.#text = text;
    this.#model = model;
    this.#tokens.clear();
    this.#comparison.search(index, passages, model);
    for (const id of ["columns", "why", "search-times"]) byId(id).replaceChildren();
    this.again();
    before?.close();
  }

  /** Searches again. */
  again() {
    const query = byId("search-query").value.trim();
    const isIdle = !query || !this.#passages.length;
    byId("search-output").hidden = isIdle;
    byId("search-hint").hidden = query || !this.#passages.length;
    this.#detail.stop();
    if (isIdle) this.#work.stop();
    else this.#work.run((signal) => this.#rank(query, signal));
  }

  async #rank(query, signal) {
    const model = this.#model;
    showLead("search", model, LOST);
    const times = new Stopwatch();
    const options = { ...readAs("query", model), ...withTokens(model) };
    const requests = [embedRequest([query], model, options)];
    const [asked, [tokens]] = await Promise.all([
      embed([query], model, options, { signal }),
      tokenize([query], model, { signal }),
    ]);
    const embedding = times.lap();
    const [vectors] = asked.texts;
    const found = await this.#index.search(vectors, CANDIDATES);
    if (signal.aborted) return;
    const scoring = times.lap();
    this.#query = readText(query, tokens, vectors);
    const merged = merge(found);
    const fused = Object.keys(found).length > 1 ? { fused: merged } : {};
    const rankings = { ...found, ...fused, reranked: null };
    await this.#show(rankings, signal);
    times.lap();
    const reason = await this.#rerank(query, merged, rankings, requests, signal);
    const reranking = times.lap();
    await this.#show(rankings, signal, reason);
    const result = this.#exported(rankings);
    const program = () => this.#program(query, model, requests[1]);
    const isText = this.#passages.every(({ file }) => !file);
    this.#bar.show(requests, result, this.#fields(query), isText ? program : undefined);
    this.#comparison.ask({
      ...{ query, vectors, found },
      factsOf: (chunks, signal) => this.#factsOf(chunks, signal),
      onShown: (compared) => Object.assign(result, { compared: this.#exported(compared) }),
    });
    const [best] = rankings.reranked ?? merged;
    if (best) this.#columns.choose(best.chunk);
    byId("search-times").textContent =
      `Query embedded in ${embedding}, all passages scored in ${scoring}` +
      (rankings.reranked ? `, ${plural(rankings.reranked.length, "passage")} reranked in ${reranking}` : "");
  }

  /** Fills the column of reranked passages; returns the reason if it cannot. */
  async #rerank(query, merged, rankings, requests, signal) {
    let room = MOST_BYTES;
    const candidates = merged
      .slice(0, RERANKED)
      .map((hit) => hit.chunk)
      .filter((chunk) => (room -= this.#passages[chunk].file?.size ?? 0) >= 0);
    if (!candidates.length) return "";
    try {
      const model = await this.#models.reranker(signal);
      if (!model) return "No reranker is configured. Set RERANKER_MODEL to use one.";
      const passages = await Promise.all(candidates.map((chunk) => inputOf(this.#passages[chunk])));
      requests.push(rerankRequest(query, passages, model));
      const { results } = await rerank(query, passages, model, { signal });
      rankings.reranked = results.map(({ index, score }) => ({ chunk: candidates[index], score }));
      return "";
    } catch (error) {
      if (signal.aborted || error.isLoading) throw error;
      return sentenceFor(error);
    }
  }

  /** The columns as data. */
  #exported(rankings) {
    const hit = ({ chunk, score }, i) => {
      const { title, text } = this.#passages[chunk];
      return { rank: i + 1, passage: lettersOf(chunk), title, text, score };
    };
    const columns = Object.entries(rankings);
    return Object.fromEntries(columns.map(([kind, hits]) => [kind, hits?.slice(0, ROWS).map(hit)]));
  }

  /** The fields of a link: the query, and the text unless it is the handbook. */
  #fields(query) {
    if (this.#text === null) return "A link cannot contain files. Paste their text to get a link.";
    return this.#text === CORPUS ? { query } : { query, text: this.#text };
  }

  /** The Python program of this search; `scoring` is the request to the reranker, if any. */
  #program(query, model, scoring) {
    const optionsOf = (type) => ({ ...named(model), ...readAs(type, model) });
    return searchProgram({
      query,
      passages: this.#passages.map(({ text }) => text),
      kinds: model.kinds,
      options: {
        query: optionsOf("query"),
        documents: optionsOf("document"),
        scores: scoring ? named({ key: scoring.body.model }) : null,
      },
      reranked: RERANKED,
      shown: ROWS,
    });
  }

  async #show(rankings, signal, reason = "") {
    const columns = Object.entries(rankings).map(([kind, hits]) => ({ id: kind, kind, hits, reason }));
    this.#columns.show(columns, await this.#factsOf(Columns.shown(rankings), signal));
  }

  /** The facts that the columns show about these passages. */
  async #factsOf(chunks, signal) {
    const unknown = chunks.filter(
      (chunk) => !this.#passages[chunk].file && !this.#tokens.has(chunk),
    );
    if (unknown.length) {
      const texts = unknown.map((chunk) => this.#passages[chunk].text);
      const tokens = await tokenize(texts, this.#model, { signal });
      unknown.forEach((chunk, i) => this.#tokens.set(chunk, tokens[i]));
    }
    const { indices = [], values = [] } = this.#query.vectors.sparse ?? {};
    const terms = new Map(Array.from(indices, (id, i) => [id, values[i]]));
    return { passages: this.#passages, tokens: this.#tokens, terms };
  }

  /**
   * Shows which words match, or the picture. A text is embedded again, as the index may have pooled its
   * vectors.
   */
  async #explain(chunk, signal) {
    const [{ text, file }, model] = [this.#passages[chunk], this.#model];
    const name = `passage ${nameOf(chunk, this.#passages)}`;
    if (file) {
      byId("why-title").textContent = `Picture: ${name}`;
      byId("why").replaceChildren(pictureOf(file, HEIGHT));
      return;
    }
    const options = { ...readAs("document", model), ...withTokens(model) };
    const {
      texts: [vectors],
    } = await embed([text], model, options, { signal });
    if (signal.aborted) return;
    const comparison = compare(this.#query, readText(text, this.#tokens.get(chunk), vectors));
    byId("why-title").textContent = `Matching words: ${name}`;
    byId("why").replaceChildren(...explanation(comparison));
  }
}

/** The matching words by the kinds of vectors; a dense vector has none. */
function explanation(comparison) {
  const { passage, shared, tokens } = comparison;
  const words = tokens
    ? renderRibbon(comparison)
    : element(
        "div.ribbon",
        element("p.words", passage.text),
        shared
          ? null
          : element(
              "p.quiet",
              "A dense vector stands for the whole text. It does not show which words match.",
            ),
      );
  if (!shared) return [words];
  const region = { class: "scroll", tabindex: "0", role: "region", "aria-label": "Shared tokens" };
  return [words, element("div", region, sharedTable(comparison))];
}

/** Measures the time of each step. */
class Stopwatch {
  #since = performance.now();

  /** The time since the last call, as text. */
  lap() {
    const before = this.#since;
    this.#since = performance.now();
    return milliseconds(this.#since - before);
  }
}
