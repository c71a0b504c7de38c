/** The view Service: what the server does now, and what it is. */

import { getMetrics, getStats } from "../core/api.js";
import { byId } from "../core/dom.js";
import { count } from "../core/format.js";
import { repeat } from "../core/poll.js";
import { sentenceFor } from "../core/work.js";
import { Chart } from "./chart.js";
import { renderFacts } from "./facts.js";
import { FIGURES } from "./figures.js";
import { Scrape } from "./prometheus.js";

const SECONDS = 2;
/** Rates and percentiles are of the time between the first and the last of so many: ten seconds. */
const SCRAPES = 6;

export function createServiceView(status) {
  const view = new ServiceView(status);
  let stop = null;
  return {
    show() {
      stop = repeat(SECONDS, () => view.refresh());
    },
    hide() {
      stop?.();
    },
  };
}

class ServiceView {
  #status;
  #charts = FIGURES.map((figure) => new Chart(figure));
  /** Those of the last seconds, the oldest first. */
  #scrapes = [];
  #refused = false;

  constructor(status) {
    this.#status = status;
    byId("charts").replaceChildren(...this.#charts.map((chart) => chart.node));
    byId("service-token").onclick = () => {
      this.#refused = false;
      this.refresh();
    };
    status.addEventListener("change", () => this.#showState());
  }

  async refresh() {
    await this.#status.refresh();
    this.#showState();
    if (this.#refused) return;
    try {
      const [stats, text] = await Promise.all([getStats(), getMetrics()]);
      this.#add(stats, new Scrape(text, performance.now()));
    } catch (error) {
      this.#fail(error);
    }
  }

  #add(stats, scrape) {
    const { health } = this.#status;
    this.#scrapes = [...this.#scrapes, scrape].slice(-SCRAPES);
    const [before] = this.#scrapes;
    FIGURES.forEach((figure, i) => {
      this.#charts[i].add(
        figure.value(before, scrape, health),
        figure.note(before, scrape, health),
      );
    });
    byId("service-message").hidden = true;
    byId("service-token").hidden = true;
    byId("totals").textContent =
      `Up for ${stats.uptime} · ${count(stats.total_requests)} requests · ` +
      `${count(stats.total_sentences)} texts · ${count(stats.total_batches)} forwards · ` +
      `${count(stats.rejected_requests)} refused`;
  }

  #fail(error) {
    this.#scrapes = [];
    for (const chart of this.#charts) chart.skip();
    // /stats and /metrics may need a token, which nobody is asked for twice a second.
    this.#refused = !error.isTemporary;
    byId("service-token").hidden = !this.#refused;
    byId("service-message").hidden = false;
    byId("service-message").textContent =
      error.status === 0
        ? "The server is away. The charts go on when it is back."
        : sentenceFor(error);
  }

  #showState() {
    const { state, health } = this.#status;
    byId("service-state").textContent = state === "away" ? "away" : (health?.reason ?? state ?? "");
    if (health) renderFacts(health);
  }
}
