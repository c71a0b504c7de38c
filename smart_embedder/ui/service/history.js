/** The figures of the last minutes, made from readings of /metrics while the view is shown. */

import { FIGURES } from "./figures.js";
import { Interval, Reading } from "./metrics.js";

/** Milliseconds. A rate or a percentile is of so many; points farther apart are not joined. */
export const WINDOW = 10_000;
export const KEPT_MINUTES = 15;
const MOST_POINTS = 300;

export class History {
  /** `{at, requests, latency, ...}`: the time, and each of FIGURES; the oldest first. */
  points = [];
  /** From the oldest reading of the window to the newest; null where there is only one. */
  interval = null;
  #readings = [];
  #uptime = 0;

  /** Adds the answers of /metrics and /stats, both of the time `at`. */
  add(text, { uptime_seconds: uptime }, at) {
    const hasRestarted = uptime < this.#uptime; // Its counters begin at zero.
    this.#uptime = uptime;
    this.#readings = this.#readings.filter((reading) => !hasRestarted && at - reading.at <= WINDOW);
    const [before] = this.#readings;
    const now = new Reading(text, at);
    this.#readings.push(now);
    this.interval = before ? new Interval(before, now) : null;
    if (!this.interval) return;
    const figures = FIGURES.map(({ id, read }) => [id, read(this.interval)]);
    this.points = [...this.points, { at, ...Object.fromEntries(figures) }]
      .filter((point) => at - point.at <= KEPT_MINUTES * 60_000)
      .slice(-MOST_POINTS);
  }
}
