/** The figures of the charts, and how they are computed from the metrics of the last seconds. */

import { amount, bytes, count, milliseconds, plural } from "../core/format.js";

const REQUESTS = ["embedding_requests_total", "rerank_requests_total"];
const REFUSED = ["embedding_requests_rejected_total", "rerank_requests_rejected_total"];
const DURATIONS = ["embedding_request_duration_seconds", "rerank_request_duration_seconds"];
const TOKENS = ["embedder_tokens_processed_total"];

const isFailed = ({ status }) => status === "error" || status === "timeout";
const seconds = (value) => milliseconds(value * 1000);

/**
 * `read(interval)` returns the figure, or null if there is none; `note(interval, health)` adds
 * details about now. `unit` is shown at the scale, empty if `format` writes it; `isWhole` marks
 * integers.
 */
export const FIGURES = [
  {
    id: "requests",
    title: "Requests per second",
    unit: "requests/s",
    format: amount,
    read: (interval) => interval.rate(REQUESTS),
    note: ({ now }) =>
      `${count(now.sum(["embedding_active_requests", "rerank_active_requests"]))} running now`,
  },
  {
    id: "latency",
    title: "Latency, 95th percentile",
    unit: "",
    format: seconds,
    read: (interval) => interval.quantile(DURATIONS, 0.95),
    note: (interval) => {
      const median = interval.quantile(DURATIONS, 0.5);
      return median === null ? "no requests" : `median ${seconds(median)}`;
    },
  },
  {
    id: "tokens",
    title: "Tokens per second",
    unit: "tokens/s",
    format: amount,
    read: (interval) => interval.rate(TOKENS),
    note: ({ now }) => `${count(now.sum(TOKENS))} since startup`,
  },
  {
    id: "queue",
    title: "Waiting requests",
    unit: "requests",
    format: count,
    isWhole: true,
    read: ({ now }) => now.sum(["embedding_queue_size"]),
    note: ({ now }) => `limit ${count(now.sum(["embedder_embedding_queue_capacity"]))}`,
  },
  {
    id: "forward_tokens",
    title: "Tokens per batch",
    unit: "tokens",
    format: count,
    read: (interval) => {
      const batches = interval.growth(["embedder_batch_tokens_count"]);
      return batches ? interval.growth(["embedder_batch_tokens_sum"]) / batches : null;
    },
    note: (_, health) => `limit ${count(health?.max_batch_tokens ?? 0)}`,
  },
  {
    id: "refused",
    title: "Refused per second",
    unit: "requests/s",
    format: amount,
    read: (interval) => interval.rate(REFUSED),
    note: ({ now }) =>
      now
        .sumsBy("reason", REFUSED)
        .map(([reason, times]) => `${reason.replaceAll("_", " ")} ${count(times)}`)
        .join(", ") || "none since startup",
  },
  {
    id: "memory",
    title: "Process memory",
    unit: "",
    format: bytes,
    read: ({ now }) => now.sum(["process_resident_memory_bytes"]) || null,
    note: ({ now }) => {
      const total = now.sum(["gpu_memory_total_bytes"]);
      const reserved = now.sum(["gpu_memory_reserved_bytes"]);
      return total ? `GPU: ${bytes(reserved)} of ${bytes(total)}` : "no GPU in use";
    },
  },
  {
    id: "failed",
    title: "Failed per second",
    unit: "requests/s",
    format: amount,
    read: (interval) => interval.rate(REQUESTS, isFailed),
    note: ({ now }) =>
      `${plural(now.sum(["embedder_abandoned_requests_total"]), "client")} left early`,
  },
];
