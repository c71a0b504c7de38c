/** Whether the server is there, and what it serves: /health, asked again and again. */

import { getHealth } from "./api.js";
import { byId } from "./dom.js";
import { repeat } from "./poll.js";

const SECONDS = 3;
const AWAY = "away";
const HEALTHY = "healthy";

/**
 * Fires `health` with each answer, `change` with each new state, and `back` when the server is
 * healthy after it was not.
 */
export class ServerStatus extends EventTarget {
  /** `healthy`, `loading`, `draining`, `unhealthy`, or `away`; null before the first answer. */
  state = null;
  /** The last answer of /health. */
  health = null;

  start() {
    repeat(SECONDS, () => this.refresh());
  }

  /** Asks once. */
  async refresh() {
    try {
      this.health = await getHealth();
      this.dispatchEvent(new Event("health"));
      this.#become(this.health.status);
    } catch {
      this.#become(AWAY);
    }
  }

  /** The first answer of /health. */
  async known() {
    while (!this.health) {
      await new Promise((resolve) => this.addEventListener("change", resolve, { once: true }));
    }
    return this.health;
  }

  #become(state) {
    const before = this.state;
    this.state = state;
    if (state === before) return;
    this.#show();
    this.dispatchEvent(new Event("change"));
    if (state === HEALTHY && before !== null) this.dispatchEvent(new Event("back"));
  }

  #show() {
    const sentence = {
      [HEALTHY]: this.health?.model,
      [AWAY]: "The server cannot be reached; trying again",
      loading: "The server is loading its models",
      draining: "The server is shutting down",
      unhealthy: "The server is unhealthy",
    };
    byId("server").dataset.state = this.state;
    byId("server-text").textContent = sentence[this.state] ?? this.state;
  }
}
