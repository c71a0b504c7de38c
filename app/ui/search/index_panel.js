/** The upper part of the view Search: indexes texts and pictures, with progress and a button to stop. */

import { ApiError } from "../core/api.js";
import { byId } from "../core/dom.js";
import { bytes, count, duration, plural } from "../core/format.js";
import { LatestWork } from "../core/work.js";
import { chosenFiles, droppedFiles, readFiles } from "./files.js";
import { indexPassages } from "./indexing.js";
import { PassageIndex } from "./passage_index.js";
import { chunkText } from "./passages.js";

const MOST_PASSAGES = 5000;
/** The number format of the index. */
export const FORMAT = "int8";

export class IndexPanel {
  #models;
  #onChange;
  #work;
  #stop = null;
  /** The latest text or files, to be indexed again with another model. */
  #given = null;
  /** The source of the present index and its description, until another index is ready. */
  #searched = null;
  #description = "";

  /**
   * Calls `onChange(index, passages, model, text)` when there is a new index, with all passages or
   * those before a stop. `text` is null if the user chose files.
   */
  constructor(models, onChange) {
    this.#models = models;
    this.#onChange = onChange;
    this.#work = new LatestWork(byId("index-message"), models.status);
    byId("index-button").onclick = () => this.begin(byId("corpus").value, true);
    byId("stop-button").onclick = () => this.#stop.abort();
    for (const id of ["corpus-files", "corpus-folder"])
      byId(id).onchange = ({ target }) => {
        const chosen = [...target.files];
        target.value = ""; // Let the user choose the same files again.
        if (chosen.length) this.#read(async () => chosenFiles(chosen));
      };
    acceptDrops(byId("drop-zone"), (items) => {
      const files = droppedFiles(items);
      this.#read(() => files);
    });
    addEventListener("beforeunload", (event) => {
      const isRunning = !byId("stop-button").hidden;
      if (this.#searched?.isOwn || (isRunning && this.#given.isOwn)) event.preventDefault();
    });
  }

  /** Indexes a text; `isOwn` if it is the user's. */
  begin(text, isOwn) {
    byId("corpus").value = text;
    const give = (take) => {
      take({ title: "", text });
      return "";
    };
    return this.#begin({ isOwn, text, give });
  }

  /** Indexes the same texts with the chosen model. */
  again() {
    return this.#begin(this.#given);
  }

  #read(list) {
    byId("corpus").value = "";
    const give = async (take, signal, { readsImages }) => {
      setRunning(true);
      return readFiles(await list(), take, tell, signal, readsImages);
    };
    this.#begin({ isOwn: true, text: null, give });
  }

  /** `give(take, signal, model)` calls `take` for each document, and returns a sentence on skipped files. */
  #begin(given) {
    this.#given = given;
    byId("index-left").textContent = "";
    byId("search-before").hidden = false;
    return this.#work.run(async (signal) => {
      this.#stop = new AbortController();
      const index = new PassageIndex();
      try {
        await this.#replace(index, given, signal);
        if (!signal.aborted) byId("search-before").hidden = true;
      } finally {
        if (this.#searched?.index !== index) index.close();
        if (!signal.aborted) {
          setRunning(false);
          tell(this.#description);
        }
      }
      if (given.isOwn && this.#searched?.index === index) showResults();
    });
  }

  /** Fills the index, which then replaces the present one. */
  async #replace(index, given, signal) {
    const stop = this.#stop.signal;
    const either = AbortSignal.any([signal, stop]);
    const passages = [];
    let found = 0;
    const take = ({ title, text, file }) => {
      const texts = file ? [text] : chunkText(text);
      const room = MOST_PASSAGES - passages.length;
      found += texts.length;
      for (const passage of texts.slice(0, room)) passages.push({ title, text: passage, file });
      return texts.length < room; // Whether there is room for another document.
    };
    const model = await this.#models.embedder(signal);
    signal.throwIfAborted();
    byId("drop-pictures").hidden = !model.readsImages;
    const left = await given.give(take, either, model);
    byId("index-left").textContent = left;
    if (either.aborted) return;
    if (!passages.length) throw new ApiError(400, "no_text", "There is no text to index.");
    const indexed = await fill(index, passages, model, either, stop);
    signal.throwIfAborted();
    byId("index-left").textContent = `${left} ${refusalsOf(passages)}`.trim();
    if (!indexed.done) return;
    this.#searched = { ...given, index };
    this.#description = describe(indexed, found);
    byId("search-samples").hidden = given.isOwn;
    this.#onChange(index, passages, model, given.text);
  }
}

/** Adds the vectors of the passages to the index until a stop; returns `{done, total, bytes}`. */
async function fill(index, passages, model, signal, stop) {
  const began = performance.now();
  const total = passages.length;
  let indexed = { done: 0, total, bytes: 0 };
  showProgress(indexed, `Indexing ${plural(total, "passage")}`);
  setRunning(true);
  try {
    await indexPassages(passages, index, model, FORMAT, {
      signal,
      onProgress(progress) {
        indexed = progress;
        const seconds = (performance.now() - began) / 1000;
        const left = duration((seconds / indexed.done) * (total - indexed.done));
        const done = `${count(indexed.done)} of ${plural(total, "passage")}`;
        showProgress(indexed, `Indexing: ${done}, about ${left} left`);
      },
      onWait: (seconds, error) => tell(waitOf(seconds, error)),
    });
  } catch (error) {
    if (!stop.aborted) throw error;
  }
  return indexed;
}

/** How many pictures the service refused, and its sentence on the first; empty if it refused none. */
function refusalsOf(passages) {
  const refused = passages.filter(({ refusal }) => refusal);
  const [first] = refused;
  return first
    ? `The service refused ${plural(refused.length, "picture")}. ${first.title}: ${first.refusal}`
    : "";
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

/** Closes the panel, so that the results come into view. */
function showResults() {
  const [panel, query] = [byId("drop-zone"), byId("search-query")];
  if (!panel.open) return;
  const hadFocus = panel.contains(document.activeElement);
  panel.open = false;
  if (hadFocus) query.focus({ preventScroll: true });
  query.scrollIntoView({ block: "start" });
}

/** Why a request is repeated, and when. */
export function waitOf(seconds, error) {
  const isOfModel = error.isLoading || error.code === "model_not_loaded";
  const known = isOfModel ? error.message.replace(/\.$/, "") : "The service is busy";
  const why = error.status === 0 ? "The server cannot be reached" : known;
  return `${why}: trying again in ${duration(seconds)}`;
}

/** Describes how many passages the index holds, of how many that were found. */
function describe({ done, total, bytes: size }, found) {
  const part =
    done < total ? `${count(done)} of ${plural(total, "passage")}` : plural(total, "passage");
  const more =
    found > MOST_PASSAGES
      ? `; only the first ${count(MOST_PASSAGES)} of ${count(found)} are indexed`
      : "";
  return `${part} in this tab's memory, ${bytes(size)}${more}`;
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
