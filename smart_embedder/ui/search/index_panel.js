/** The upper part of the view Search: a text becomes an index, with progress and a way to stop. */

import { byId } from "../core/dom.js";
import { bytes, count, duration, plural } from "../core/format.js";
import { LatestWork } from "../core/work.js";
import { chunkText } from "./chunks.js";
import { indexTexts } from "./indexing.js";

const MOST_PASSAGES = 5000;

export class IndexPanel {
  #index;
  #models;
  #onChange;
  #stop = null;
  #text = "";
  #work;

  /**
   * `onChange(texts, model)` is called with no texts when the index is emptied, and with all of them
   * when they are in it, or as many as there are at a stop.
   */
  constructor(index, models, onChange) {
    this.#index = index;
    this.#models = models;
    this.#onChange = onChange;
    this.#work = new LatestWork(byId("index-message"), models.status);
    const corpus = byId("corpus");
    byId("index-button").onclick = () => this.begin(corpus.value);
    byId("stop-button").onclick = () => this.#stop?.abort();
    byId("corpus-file").onchange = ({ target }) => this.#read(target.files[0]);
    acceptDrops(byId("drop-zone"), (file) => this.#read(file));
  }

  /** Indexes a text, in place of what was indexed before. */
  begin(text) {
    byId("corpus").value = text;
    this.#text = text;
    return this.again();
  }

  /** Indexes the same text by the model that is chosen now. */
  again() {
    this.#onChange([], null);
    return this.#work.run((signal) => this.#run(this.#text, signal));
  }

  async #read(file) {
    if (file) await this.begin(await file.text());
  }

  async #run(text, signal) {
    const found = chunkText(text);
    const texts = found.slice(0, MOST_PASSAGES);
    this.#stop = new AbortController();
    const began = performance.now();
    let indexed = { done: 0, total: texts.length, bytes: 0 };
    const show = (progress) => {
      indexed = progress;
      const seconds = (performance.now() - began) / 1000;
      const left = progress.done ? (seconds / progress.done) * (progress.total - progress.done) : 0;
      showProgress(
        progress,
        `${count(progress.done)} of ${count(progress.total)}, about ${duration(left)} left`,
      );
    };
    await this.#index.clear();
    const model = await this.#models.embedder(signal);
    signal.throwIfAborted();
    showProgress(indexed, `0 of ${count(texts.length)}`);
    setRunning(true);
    try {
      await indexTexts(texts, this.#index, model, {
        signal: AbortSignal.any([signal, this.#stop.signal]),
        onProgress: show,
        onWait: (seconds, error) => tellWait(seconds, error),
      });
    } catch (error) {
      if (signal.aborted || !this.#stop.signal.aborted) throw error;
    } finally {
      if (!signal.aborted) setRunning(false);
    }
    tellEnd(indexed, found.length);
    this.#onChange(texts, model);
  }
}

function setRunning(isRunning) {
  byId("stop-button").hidden = !isRunning;
  byId("index-progress").hidden = !isRunning;
}

function showProgress({ done, total }, text) {
  Object.assign(byId("index-progress"), { value: done, max: Math.max(total, 1) });
  byId("index-state").textContent = text;
}

function tellWait(seconds, error) {
  const isOfModel = error.isLoading || error.code === "model_not_loaded";
  const known = isOfModel ? error.message.replace(/\.$/, "") : "The service is busy";
  const why = error.status === 0 ? "The server is away" : known;
  byId("index-state").textContent = `${why}: trying again in ${duration(seconds)}`;
}

function tellEnd({ done, total, bytes: size }, found) {
  const part =
    done < total ? `${count(done)} of ${plural(total, "passage")}` : plural(total, "passage");
  const more =
    found > MOST_PASSAGES
      ? `; only the first ${count(MOST_PASSAGES)} of ${count(found)} are taken`
      : "";
  byId("index-state").textContent = `${part} in this tab's memory, ${bytes(size)}${more}`;
}

function acceptDrops(zone, read) {
  const mark = (isOver) => (event) => {
    event.preventDefault();
    zone.classList.toggle("over", isOver);
  };
  zone.addEventListener("dragover", mark(true));
  zone.addEventListener("dragleave", mark(false));
  zone.addEventListener("drop", (event) => {
    mark(false)(event);
    read(event.dataTransfer.files[0]);
  });
}
