/** The index of the passages, which lives in a worker. */

export class PassageIndex {
  #worker = new Worker(new URL("./index_worker.js", import.meta.url), { type: "module" });
  #waiting = new Map();
  #calls = 0;

  constructor() {
    this.#worker.onmessage = ({ data: { id, result, error } }) => {
      const { resolve, reject } = this.#waiting.get(id);
      this.#waiting.delete(id);
      if (error === undefined) resolve(result);
      else reject(new Error(error));
    };
    // Such as a lack of memory.
    this.#worker.onerror = ({ message }) => this.#fail(message);
  }

  /** Frees the memory of the index; nothing can be asked of it afterwards. */
  close() {
    this.#worker.terminate();
    this.#fail("closed");
  }

  /** Adds vectors of passages from number `first` on; `{bytes}` is the size of the whole index. */
  add(first, buffer) {
    return this.#call("add", { first, buffer }, [buffer]);
  }

  /** The best `limit` passages by each kind that the query has: `{dense: [{chunk, score}], ...}`. */
  search(query, limit) {
    return this.#call("search", { query, limit });
  }

  /** `{bytes, vectors, milliseconds}` of all passages and of scoring them, for each kind of the query. */
  measure(query) {
    return this.#call("measure", { query });
  }

  #fail(reason) {
    for (const { reject } of this.#waiting.values())
      reject(new Error(`the index ended: ${reason}`));
    this.#waiting.clear();
  }

  #call(job, details, transfer = []) {
    return new Promise((resolve, reject) => {
      const id = this.#calls++;
      this.#waiting.set(id, { resolve, reject });
      this.#worker.postMessage({ id, job, ...details }, transfer);
    });
  }
}
