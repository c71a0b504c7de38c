/** The upper part of the view Search: a text becomes an index, with progress and a way to stop. */

import { byId } from "../core/dom.js";
import { bytes, count, duration, plural } from "../core/format.js";
import { LatestWork } from "../core/work.js";
import { chunkText } from "./chunks.js";
import { indexTexts } from "./indexing.js";

const MOST_PASSAGES = 5000;

export class IndexPanel {
  #index;
  #onIndexed;
  #stop = null;
  #work;

  /** `onIndexed(texts)` is called when all passages are in the index, or as many as there are at a stop. */
  constructor(index, status, onIndexed) {
    this.#index = index;
    this.#onIndexed = onIndexed;
    this.#work = new LatestWork(byId("index-message"), status);
    const corpus = byId("corpus");
    byId("index-button").onclick = () => this.begin(corpus.value);
    byId("stop-button").onclick = () => this.#stop?.abort();
    byId("corpus-file").onchange = ({ target }) => this.#read(target.files[0]);
    acceptDrops(byId("drop-zone"), (file) => this.#read(file));
  }

  /** Indexes a text, in place of what was indexed before. */
  begin(text) {
    byId("corpus").value = text;
    return this.#work.run((signal) => this.#run(text, signal));
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
    showProgress(indexed, `0 of ${count(texts.length)}`);
    setRunning(true);
    try {
      await indexTexts(texts, this.#index, {
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
    this.#onIndexed(texts);
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
  const why = error.status === 0 ? "The server is away" : "The service is busy";
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
