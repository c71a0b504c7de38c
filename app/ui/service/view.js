/** The view Service: charts of the server's work, and facts about it. */

import { getMetrics, getStats } from "../core/api.js";
import { byId } from "../core/dom.js";
import { count, time } from "../core/format.js";
import { repeat } from "../core/poll.js";
import { sentenceFor } from "../core/work.js";
import { Chart } from "./chart.js";
import { renderFacts } from "./facts.js";
import { FIGURES } from "./figures.js";
import { History, KEPT_MINUTES } from "./history.js";

const SECONDS = 3;

export class ServiceView {
  #status;
  #charts = FIGURES.map((figure) => new Chart(figure));
  #history = new History();
  #refused = false;
  #stop = null;

  constructor(status) {
    this.#status = status;
    byId("charts").replaceChildren(...this.#charts.map((chart) => chart.node));
    byId("service-token").onclick = () => {
      this.#refused = false;
      this.#refresh();
    };
    status.addEventListener("change", () => this.#showState());
  }

  show() {
    this.#stop = repeat(SECONDS, () => this.#refresh());
  }

  hide() {
    this.#stop?.();
  }

  async #refresh() {
    await this.#status.refresh();
    this.#showState();
    if (this.#refused) return;
    try {
      this.#draw(...(await Promise.all([getStats(), getMetrics()])));
    } catch (error) {
      this.#fail(error);
    }
  }

  #draw(stats, metrics) {
    this.#history.add(metrics, stats, Date.now());
    for (const chart of this.#charts) chart.show(this.#history, this.#status.health);
    const { points } = this.#history;
    if (points.length > 1)
      byId("charts-since").textContent =
        `Since ${time(points[0].at)}, every ${SECONDS} seconds while this view is open; ` +
        `at most ${KEPT_MINUTES} minutes.`;
    byId("service-message").hidden = true;
    byId("service-token").hidden = true;
    byId("totals").textContent =
      `Up for ${stats.uptime} · ${count(stats.total_requests)} requests · ` +
      `${count(stats.total_sentences)} texts · ${count(stats.total_batches)} batches · ` +
      `${count(stats.rejected_requests)} refused`;
  }

  #fail(error) {
    // /metrics may need a token; do not ask for it every few seconds.
    this.#refused = !error.isTemporary;
    byId("service-token").hidden = !this.#refused;
    byId("service-message").hidden = false;
    byId("service-message").textContent =
      error.status === 0
        ? "The server cannot be reached. The charts continue when it is back."
        : sentenceFor(error);
  }

  #showState() {
    const { state, health } = this.#status;
    byId("service-state").textContent = state === "away" ? "not reachable" : (health?.reason ?? state ?? "");
    if (health) renderFacts(health);
  }
}
