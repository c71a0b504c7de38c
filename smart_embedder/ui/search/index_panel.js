/** The upper part of the view Search: texts become an index, with progress and a way to stop. */

import { byId } from "../core/dom.js";
import { bytes, count, duration, plural } from "../core/format.js";
import { LatestWork } from "../core/work.js";
import { chosenFiles, droppedFiles, readFiles } from "./files.js";
import { indexTexts } from "./indexing.js";
import { chunkText } from "./passages.js";

const MOST_PASSAGES = 5000;
/** Of the numbers in the index: a byte each. */
export const FORMAT = "int8";

export class IndexPanel {
  #index;
  #models;
  #onChange;
  #work;
  #stop = null;
  /** What was indexed last, to be indexed again by another model. */
  #given = null;
  /** `{text, title}` of each, and how many there were. */
  #passages = [];
  #found = 0;

  /**
   * `onChange(passages, model, text)` is called with none when the index is emptied, and with all of
   * them when they are in it, or as many as there are at a stop. `text` is null where files were given.
   */
  constructor(index, models, onChange) {
    this.#index = index;
    this.#models = models;
    this.#onChange = onChange;
    this.#work = new LatestWork(byId("index-message"), models.status);
    byId("index-button").onclick = () => this.begin(byId("corpus").value, true);
    byId("stop-button").onclick = () => this.#stop.abort();
    for (const id of ["corpus-files", "corpus-folder"])
      byId(id).onchange = ({ target }) => {
        const chosen = [...target.files];
        target.value = ""; // So that the same can be chosen once more.
        if (chosen.length) this.#read(async () => chosenFiles(chosen));
      };
    acceptDrops(byId("drop-zone"), (items) => {
      const files = droppedFiles(items);
      this.#read(() => files);
    });
    addEventListener("beforeunload", (event) => {
      if (this.#given?.isOwn && this.#passages.length) event.preventDefault();
    });
  }

  /** Indexes a text, in place of what was indexed before; `isOwn` where the user has given it. */
  begin(text, isOwn) {
    byId("corpus").value = text;
    const give = () => {
      this.#take({ title: "", text });
      return "";
    };
    return this.#begin({ isOwn, text, give });
  }

  /** Indexes the same by the model that is chosen now. */
  again() {
    return this.#begin(this.#given);
  }

  #read(list) {
    byId("corpus").value = "";
    const give = async (signal) => {
      setRunning(true);
      return readFiles(await list(), (document) => this.#take(document), tell, signal);
    };
    this.#begin({ isOwn: true, text: null, give });
  }

  /** `give(signal)` calls #take for each document, and returns a sentence on what is left out. */
  #begin(given) {
    const { isOwn, give } = given;
    this.#given = given;
    this.#onChange([], null, null);
    byId("search-samples").hidden = isOwn;
    byId("index-left").textContent = "";
    return this.#work.run(async (signal) => {
      this.#stop = new AbortController();
      const either = AbortSignal.any([signal, this.#stop.signal]);
      [this.#passages, this.#found] = [[], 0];
      try {
        const left = await give(either);
        signal.throwIfAborted();
        byId("index-left").textContent = left;
        await this.#run(signal, either);
      } finally {
        if (!signal.aborted) setRunning(false);
      }
      if (isOwn && this.#passages.length) showResults();
    });
  }

  /** Whether more can be taken after this document. */
  #take({ title, text }) {
    const texts = chunkText(text);
    const room = MOST_PASSAGES - this.#passages.length;
    this.#found += texts.length;
    for (const each of texts.slice(0, room)) this.#passages.push({ title, text: each });
    return texts.length < room;
  }

  async #run(signal, either) {
    const texts = this.#passages.map(({ text }) => text);
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
      await indexTexts(texts, this.#index, model, FORMAT, {
        signal: either,
        onProgress: show,
        onWait: (seconds, error) => tell(waitOf(seconds, error)),
      });
    } catch (error) {
      if (signal.aborted || !this.#stop.signal.aborted) throw error;
    }
    tellEnd(indexed, this.#found);
    this.#onChange(this.#passages, model, this.#given.text);
  }
}

function setRunning(isRunning) {
  byId("stop-button").hidden = !isRunning;
  byId("index-progress").hidden = !isRunning;
}

function showProgress({ done, total }, text) {
  Object.assign(byId("index-progress"), { value: done, max: Math.max(total, 1) });
  tell(text);
}

function tell(text) {
  byId("index-state").textContent = text;
}

/** Folds the panel, so that the results come into view. */
function showResults() {
  const [panel, query] = [byId("drop-zone"), byId("search-query")];
  if (!panel.open) return;
  const hadFocus = panel.contains(document.activeElement);
  panel.open = false;
  if (hadFocus) query.focus({ preventScroll: true });
  query.scrollIntoView({ block: "start" });
}

/** Why is waited for the service, and for how long. */
export function waitOf(seconds, error) {
  const isOfModel = error.isLoading || error.code === "model_not_loaded";
  const known = isOfModel ? error.message.replace(/\.$/, "") : "The service is busy";
  const why = error.status === 0 ? "The server is away" : known;
  return `${why}: trying again in ${duration(seconds)}`;
}

function tellEnd({ done, total, bytes: size }, found) {
  const part =
    done < total ? `${count(done)} of ${plural(total, "passage")}` : plural(total, "passage");
  const more =
    found > MOST_PASSAGES
      ? `; only the first ${count(MOST_PASSAGES)} of ${count(found)} are taken`
      : "";
  tell(`${part} in this tab's memory, ${bytes(size)}${more}`);
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
    const { files, items } = event.dataTransfer;
    if (files.length) read(items);
  });
}
