/** The state of the server, polled from /health. */

import { getHealth } from "./api.js";
import { byId } from "./dom.js";
import { repeat } from "./poll.js";

const SECONDS = 3;
const AWAY = "away";
const HEALTHY = "healthy";

/**
 * Fires `health` with each response, `change` with each new state, and `back` when the server
 * becomes healthy again.
 */
export class ServerStatus extends EventTarget {
  /** `healthy`, `loading`, `draining`, `unhealthy`, or `away`; null before the first answer. */
  state = null;
  /** The last response of /health. */
  health = null;

  start() {
    repeat(SECONDS, () => this.refresh());
  }

  /** Requests /health once. */
  async refresh() {
    try {
      this.health = await getHealth();
      this.dispatchEvent(new Event("health"));
      this.#become(this.health.status);
    } catch {
      this.#become(AWAY);
    }
  }

  /** The first response of /health. */
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
