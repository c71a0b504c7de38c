/** Reads the text format of Prometheus, and what happened between two scrapes. */

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** One scrape: `at` is its time in milliseconds. */
export class Scrape {
  constructor(text, at) {
    this.at = at;
    this.samples = new Map();
    for (const line of text.split("\n")) {
      const found = line.startsWith("#") ? null : SAMPLE.exec(line);
      if (found) this.#add(found);
    }
  }

  #add([, name, labels = "", value]) {
    if (!this.samples.has(name)) this.samples.set(name, []);
    const pairs = Array.from(labels.matchAll(LABEL), ([, label, text]) => [label, text]);
    this.samples.get(name).push({ labels: Object.fromEntries(pairs), value: Number(value) });
  }

  /** The sum of all series of a name whose labels are `labels`; null where there is none. */
  sum(name, labels = {}) {
    const found = this.#matching(name, labels);
    return found.length ? found.reduce((total, { value }) => total + value, 0) : null;
  }

  /** The upper limits of a histogram's buckets with the counts up to each, all series summed. */
  buckets(name) {
    const counts = new Map();
    for (const { labels, value } of this.#matching(`${name}_bucket`, {})) {
      const limit = labels.le === "+Inf" ? Infinity : Number(labels.le);
      counts.set(limit, (counts.get(limit) ?? 0) + value);
    }
    return [...counts].sort(([a], [b]) => a - b);
  }

  #matching(name, labels) {
    return (this.samples.get(name) ?? []).filter((sample) =>
      Object.entries(labels).every(([label, text]) => sample.labels[label] === text),
    );
  }
}

/** How much counters grew between two scrapes; a server that began anew counts from zero. */
export function growth(before, after, name, labels) {
  const [old, now] = [before.sum(name, labels) ?? 0, after.sum(name, labels) ?? 0];
  return now < old ? now : now - old;
}

/** The growth for each second. */
export const rate = (before, after, name, labels) =>
  growth(before, after, name, labels) / Math.max((after.at - before.at) / 1000, 0.001);

/**
 * The value below which `share` of what was observed between two scrapes lies, interpolated within
 * its bucket as Prometheus does it; null where nothing was observed.
 */
export function quantile(before, after, name, share) {
  const old = new Map(before.buckets(name));
  const grown = after.buckets(name).map(([limit, total]) => [limit, total - (old.get(limit) ?? 0)]);
  const all = grown.at(-1)?.[1] ?? 0;
  if (all <= 0) return null;
  const place = grown.findIndex(([, total]) => total >= share * all);
  const [limit, total] = grown[place];
  const [lowest, below] = place ? grown[place - 1] : [0, 0];
  if (limit === Infinity) return lowest;
  return lowest + (limit - lowest) * ((share * all - below) / Math.max(total - below, 1));
}
