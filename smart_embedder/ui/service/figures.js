/** What the charts show of the figures that the service keeps, each of ten seconds. */

import { amount, bytes, count, milliseconds, plural } from "../core/format.js";

const seconds = (value) => (value === null ? "–" : milliseconds(value * 1000));

/** What a chart draws is the figure `id`; `note(figures, present, health)` says more about now. */
export const FIGURES = [
  {
    id: "requests",
    title: "Requests per second",
    format: amount,
    note: (_, present) => `${count(present.active_requests)} running now`,
  },
  {
    id: "latency",
    title: "Latency, 95th percentile",
    format: seconds,
    note: ({ median }) => `median ${seconds(median)}, last 10 seconds`,
  },
  {
    id: "tokens",
    title: "Tokens per second",
    format: amount,
    note: (_, present) => `${count(present.tokens)} since startup`,
  },
  {
    id: "queue",
    title: "Waiting requests",
    format: count,
    note: (_, present) => `limit ${count(present.queue_capacity)}`,
  },
  {
    id: "forward_tokens",
    title: "Tokens per batch",
    format: (value) => (value === null ? "–" : count(value)),
    note: (_, __, health) => `limit ${count(health?.max_batch_tokens ?? 0)}`,
  },
  {
    id: "refused",
    title: "Refused, last 10 seconds",
    format: count,
    note: (_, { refused }) =>
      Object.entries(refused)
        .map(([reason, times]) => `${reason.replaceAll("_", " ")} ${count(times)}`)
        .join(", ") || "none since startup",
  },
  {
    id: "memory",
    title: "Process memory",
    format: (value) => (value === null ? "not known" : bytes(value)),
    note: (_, { gpu_memory: { reserved, total } }) =>
      total ? `GPU: ${bytes(reserved)} of ${bytes(total)}` : "no GPU in use",
  },
  {
    id: "failed",
    title: "Failed, last 10 seconds",
    format: count,
    note: (_, present) => `${plural(present.abandoned, "client")} left early`,
  },
];
