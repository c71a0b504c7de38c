/** The view Service: what the server does now, and what it is. */

import { getClients, getHistory, getStats } from "../core/api.js";
import { byId, numberCell, table } from "../core/dom.js";
import { count, shortened } from "../core/format.js";
import { repeat } from "../core/poll.js";
import { sentenceFor } from "../core/work.js";
import { Chart } from "./chart.js";
import { renderFacts } from "./facts.js";
import { FIGURES } from "./figures.js";

/** The service adds a figure in each. */
const SECONDS = 5;

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
  #refused = false;

  constructor(status) {
    this.#status = status;
    byId("charts").replaceChildren(...this.#charts.map((chart) => chart.node));
    byId("service-token").onclick = () => {
      this.#refused = false;
      this.refresh();
    };
    byId("clients-button").onclick = () => this.#showClients();
    status.addEventListener("change", () => this.#showState());
  }

  async refresh() {
    await this.#status.refresh();
    this.#showState();
    if (this.#refused) return;
    try {
      this.#show(...(await Promise.all([getStats(), getHistory()])));
    } catch (error) {
      this.#fail(error);
    }
  }

  #show(stats, { recent, present }) {
    if (recent.length)
      for (const chart of this.#charts) chart.show(recent, present, this.#status.health);
    byId("service-message").hidden = true;
    byId("service-token").hidden = true;
    byId("totals").textContent =
      `Up for ${stats.uptime} · ${count(stats.total_requests)} requests · ` +
      `${count(stats.total_sentences)} texts · ${count(stats.total_batches)} batches · ` +
      `${count(stats.rejected_requests)} refused`;
  }

  #fail(error) {
    // It may need a token, which nobody is asked for every few seconds.
    this.#refused = !error.isTemporary;
    byId("service-token").hidden = !this.#refused;
    byId("service-message").hidden = false;
    byId("service-message").textContent =
      error.status === 0
        ? "The server cannot be reached. The charts continue when it is back."
        : sentenceFor(error);
  }

  async #showClients() {
    const shown = byId("clients");
    try {
      const rows = (await getClients()).map(({ client, requests, refused }) => [
        client === null ? "all others" : shortened(client.replace(/^address:/, "")),
        ...[requests, refused].map((number) => numberCell(count(number))),
      ]);
      shown.replaceChildren(table({ class: "clients" }, ["Client", "Requests", "Refused"], rows));
    } catch (error) {
      shown.textContent = sentenceFor(error);
    }
  }

  #showState() {
    const { state, health } = this.#status;
    byId("service-state").textContent = state === "away" ? "not reachable" : (health?.reason ?? state ?? "");
    if (health) renderFacts(health);
  }
}
