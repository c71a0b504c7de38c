/** What the charts show: each figure is a number made of two scrapes of /metrics, ten seconds apart. */

import { amount, bytes, count, milliseconds, plural } from "../core/format.js";
import { growth, quantile, rate } from "./prometheus.js";

const EMBEDDING = "embedding_requests_total";
const RERANK = "rerank_requests_total";
const REFUSED = ["embedding_requests_rejected_total", "rerank_requests_rejected_total"];
const LATENCIES = ["embedding_request_duration_seconds", "rerank_request_duration_seconds"];

const seconds = (value) => (value === null ? "–" : milliseconds(value * 1000));

const slowest = (before, after, share) => {
  const found = LATENCIES.map((name) => quantile(before, after, name, share)).filter(
    (each) => each !== null,
  );
  return found.length ? Math.max(...found) : null;
};

const both = (before, after, names) =>
  names.reduce((sum, name) => sum + growth(before, after, name), 0);

/** Tokens of the forwards between two scrapes, as a share of what a forward may hold. */
function batchFill(before, after, health) {
  const forwards = growth(before, after, "embedder_batch_tokens_count");
  if (!forwards || !health?.max_batch_tokens) return null;
  return growth(before, after, "embedder_batch_tokens_sum") / forwards / health.max_batch_tokens;
}

const gpuMemory = (scrape) => scrape.sum("gpu_memory_total_bytes") || 0;

/** `value(before, after, health)` is a number or null; `note` says more about the present. */
export const FIGURES = [
  {
    id: "requests",
    title: "Requests a second",
    format: amount,
    value: (before, after) => rate(before, after, EMBEDDING) + rate(before, after, RERANK),
    note: (before, after) => {
      const active =
        (after.sum("embedding_active_requests") ?? 0) + (after.sum("rerank_active_requests") ?? 0);
      return `${count(active)} in work now`;
    },
  },
  {
    id: "latency",
    title: "Latency, 95th percentile",
    format: seconds,
    value: (before, after) => slowest(before, after, 0.95),
    note: (before, after) => `median ${seconds(slowest(before, after, 0.5))}, last 10 seconds`,
  },
  {
    id: "tokens",
    title: "Tokens a second",
    format: amount,
    value: (before, after) => rate(before, after, "embedder_tokens_processed_total"),
    note: (_, after) => `${count(after.sum("embedder_tokens_processed_total") ?? 0)} since the start`,
  },
  {
    id: "queue",
    title: "Requests waiting",
    format: count,
    value: (_, after) => after.sum("embedding_queue_size"),
    note: (_, after) => `room for ${count(after.sum("embedder_embedding_queue_capacity") ?? 0)}`,
  },
  {
    id: "fill",
    title: "Batch fill",
    format: (value) => (value === null ? "–" : `${amount(value * 100)} %`),
    value: batchFill,
    note: (before, after, health) =>
      `of ${count(health?.max_batch_tokens ?? 0)} tokens in a forward`,
  },
  {
    id: "refused",
    title: "Refused in 10 seconds",
    format: count,
    value: (before, after) => both(before, after, REFUSED),
    note: (_, after) =>
      `${plural(
        REFUSED.reduce((sum, name) => sum + (after.sum(name) ?? 0), 0),
        "refusal",
      )} since the start`,
  },
  {
    id: "memory",
    title: "Memory of the process",
    format: (value) => (value === null ? "not known" : bytes(value)),
    value: (_, after) => after.sum("process_resident_memory_bytes"),
    note: (_, after) =>
      gpuMemory(after)
        ? `GPU: ${bytes(after.sum("gpu_memory_reserved_bytes"))} of ${bytes(gpuMemory(after))}`
        : "no GPU in use",
  },
  {
    id: "errors",
    title: "Failed in 10 seconds",
    format: count,
    value: (before, after) =>
      ["error", "timeout"].reduce(
        (sum, status) =>
          sum +
          growth(before, after, EMBEDDING, { status }) +
          growth(before, after, RERANK, { status }),
        0,
      ),
    note: (_, after) =>
      `${count(after.sum("embedder_abandoned_requests_total") ?? 0)} clients left before their answer`,
  },
];
