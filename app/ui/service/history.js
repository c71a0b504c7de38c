/** The figures of the last minutes for the charts, computed from /metrics. */

import { FIGURES } from "./figures.js";

/** Milliseconds of a rate or a percentile; points farther apart are not joined. */
export const WINDOW = 10_000;
export const KEPT_MINUTES = 15;
const SAMPLE = /^(\w+)(?:\{(.*)\})? (\S+)$/gm;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** All samples of one response of /metrics. */
export class Reading {
  #samples = new Map();

  /** `at` is the time in milliseconds. */
  constructor(text, at) {
    this.at = at;
    for (const [, name, labels = "", value] of text.matchAll(SAMPLE)) {
      const pairs = [...labels.matchAll(LABEL)].map(([, label, word]) => [label, word]);
      if (!this.#samples.has(name)) this.#samples.set(name, []);
      this.#samples.get(name).push({ labels: Object.fromEntries(pairs), value: Number(value) });
    }
  }

  /** The sum of the samples with these names; `wanted` chooses some by their labels. */
  sum(names, wanted = () => true) {
    return this.#named(names)
      .filter(({ labels }) => wanted(labels))
      .reduce((sum, { value }) => sum + value, 0);
  }

  /** `[word, sum]` for each word of a label, without those of zero, the largest first. */
  sumsBy(label, names) {
    const words = new Set(this.#named(names).map(({ labels }) => labels[label]));
    return [...words]
      .map((word) => [word, this.sum(names, (labels) => labels[label] === word)])
      .filter(([, sum]) => sum)
      .sort(([, one], [, other]) => other - one);
  }

  /** `[limit, count]` of histograms, added up, by rising limits, the last of which is infinite. */
  buckets(names) {
    const counts = new Map();
    for (const { labels, value } of this.#named(names.map((name) => `${name}_bucket`))) {
      const limit = labels.le === "+Inf" ? Infinity : Number(labels.le);
      counts.set(limit, (counts.get(limit) ?? 0) + value);
    }
    return [...counts].sort(([one], [other]) => one - other);
  }

  #named(names) {
    return names.flatMap((name) => this.#samples.get(name) ?? []);
  }
}

/** The difference between two readings. */
export class Interval {
  constructor(before, now) {
    Object.assign(this, { before, now });
  }

  growth(names, wanted) {
    return this.now.sum(names, wanted) - this.before.sum(names, wanted);
  }

  /** The growth per second. */
  rate(names, wanted) {
    return this.growth(names, wanted) / ((this.now.at - this.before.at) / 1000);
  }

  /**
   * The value below which a share of the histograms' new observations lies, interpolated as
   * Prometheus does it; null without any.
   */
  quantile(names, share) {
    const before = new Map(this.before.buckets(names));
    const grown = this.now
      .buckets(names)
      .map(([limit, number]) => [limit, number - (before.get(limit) ?? 0)]);
    const wanted = share * (grown.at(-1)?.[1] ?? 0);
    if (!wanted) return null;
    const place = grown.findIndex(([, number]) => number >= wanted);
    const [lowest, below] = grown[place - 1] ?? [0, 0];
    const [limit, number] = grown[place];
    if (limit === Infinity) return lowest;
    return lowest + ((limit - lowest) * (wanted - below)) / (number - below);
  }
}

/** The points of the charts. */
export class History {
  /** `{at, requests, latency, ...}`: the time, and each of FIGURES; the oldest first. */
  points = [];
  /** The latest interval; null if there is only one reading. */
  interval = null;
  #readings = [];
  #uptime = 0;

  /** Adds the responses of /metrics and /stats, both of the time `at`. */
  add(text, { uptime_seconds: uptime }, at) {
    const hasRestarted = uptime < this.#uptime; // The counters begin at zero again.
    this.#uptime = uptime;
    this.#readings = this.#readings.filter((reading) => !hasRestarted && at - reading.at <= WINDOW);
    const [before] = this.#readings;
    const now = new Reading(text, at);
    this.#readings.push(now);
    this.interval = before ? new Interval(before, now) : null;
    if (!this.interval) return;
    const figures = FIGURES.map(({ id, read }) => [id, read(this.interval)]);
    this.points.push({ at, ...Object.fromEntries(figures) });
    this.points = this.points.filter((point) => at - point.at <= KEPT_MINUTES * 60_000);
  }
}
