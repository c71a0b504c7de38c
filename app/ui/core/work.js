/** Runs one piece of a view's work at a time: newer work aborts older, and errors go to one place. */

import { ApiError } from "./api.js";
import { duration } from "./format.js";

const RETRY_SECONDS = 2;
const NOT_FOUND = 404;

export class LatestWork {
  #controller = null;
  #failed = null;

  /** `message` is the element that shows errors. `status` fires `back` when the server is back. */
  constructor(message, status) {
    this.message = message;
    status.addEventListener("back", () => this.#failed && this.run(this.#failed));
  }

  /** Aborts older work and runs `work(signal)`. Failed work runs again when the server is back. */
  async run(work) {
    this.#controller?.abort();
    const controller = new AbortController();
    this.#controller = controller;
    try {
      await work(controller.signal);
      if (controller.signal.aborted) return;
      this.#failed = null;
      this.tell("");
    } catch (error) {
      if (controller.signal.aborted) return;
      // A missing model may mean that a server with other models has just started.
      this.#failed = error.isTemporary || error.status === NOT_FOUND ? work : null;
      this.tell(sentenceFor(error));
      const seconds = error.retryAfter ?? RETRY_SECONDS;
      if (error.isLoading) setTimeout(() => this.#again(controller), seconds * 1000);
    }
  }

  /** Aborts the work, and does not run it again. */
  stop() {
    this.#controller?.abort();
    this.#failed = null;
    this.tell("");
  }

  #again(controller) {
    if (this.#controller === controller && !controller.signal.aborted && this.#failed)
      this.run(this.#failed);
  }

  tell(text) {
    this.message.textContent = text;
    this.message.hidden = !text;
  }
}

/** The sentence that describes an error to the user. */
export function sentenceFor(error) {
  if (!(error instanceof ApiError)) {
    console.error(error);
    return `The page failed: ${error.message}`;
  }
  const wait = error.retryAfter ? ` Try again in ${duration(error.retryAfter)}.` : "";
  return `${error.message}${wait}`;
}
