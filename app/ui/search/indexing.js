/** Sends passages to the service in batches, and their vectors to the index. */

import { embedRaw, readAs } from "../core/api.js";

const REQUESTS_AT_ONCE = 2;
/** Passages in a request: more if responses are fast, so that progress remains visible. */
const PASSAGES = { first: 8, fewest: 4, most: 64 };
const SECONDS = { soon: 0.5, late: 2 };
const RETRY_SECONDS = 2;
/**
 * Texts of more characters have each two similar ColBERT vectors joined, so that they fit the tab. The
 * service needs half as long again for that.
 */
const POOLED_FROM = 1_000_000;

/** The options of the requests for the vectors; `format` is the number format of dense and ColBERT vectors. */
export function optionsFor(texts, model, format) {
  const made = (kind) => model.kinds.includes(kind);
  const characters = texts.reduce((sum, text) => sum + text.length, 0);
  return {
    ...readAs("document", model),
    ...(made("dense") || made("colbert") ? { output_dtype: format } : {}),
    ...(made("colbert") && characters > POOLED_FROM ? { colbert_pool_factor: 2 } : {}),
  };
}

/**
 * Adds the vectors of `texts` by `model`, in a number format of the service, to the `index`. Ends
 * early when `given` is aborted or a request fails. Calls `onProgress({done, total, bytes})` after each
 * request, and `onWait(seconds, error)` before it repeats one that was refused for now.
 */
export async function indexTexts(texts, index, model, format, { signal: given, onProgress, onWait }) {
  const options = optionsFor(texts, model, format);
  const failed = new AbortController();
  const signal = AbortSignal.any([given, failed.signal]);
  let next = 0;
  let done = 0;
  let size = PASSAGES.first;

  const sendSome = async () => {
    while (next < texts.length) {
      const first = next;
      next += size;
      const part = texts.slice(first, next);
      const send = () => timed(embedRaw(part, model, options, { signal, background: true }));
      const { seconds, buffer } = await retry(send, signal, onWait);
      size = sizeAfter(part.length, seconds);
      signal.throwIfAborted(); // The index may be closed by now.
      const { bytes } = await index.add(first, buffer);
      done += part.length;
      onProgress({ done, total: texts.length, bytes });
    }
  };
  try {
    await Promise.all(Array.from({ length: REQUESTS_AT_ONCE }, sendSome));
  } finally {
    failed.abort();
  }
}

async function timed(answer) {
  const began = performance.now();
  const buffer = await answer;
  return { buffer, seconds: (performance.now() - began) / 1000 };
}

function sizeAfter(size, seconds) {
  if (seconds < SECONDS.soon) return Math.min(PASSAGES.most, size * 2);
  return seconds > SECONDS.late ? Math.max(PASSAGES.fewest, Math.ceil(size / 2)) : size;
}

/** Retries while the service is busy or away, after the time that it asks for. */
async function retry(send, signal, onWait) {
  for (;;) {
    try {
      return await send();
    } catch (error) {
      if (signal.aborted || !error.isTemporary) throw error;
      const seconds = error.retryAfter ?? RETRY_SECONDS;
      onWait(seconds, error);
      await pause(seconds, signal);
    }
  }
}

/** Waits; rejects when `signal` is aborted. */
function pause(seconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, seconds * 1000);
    signal.addEventListener(
      "abort",
      () => {
        clearTimeout(timer);
        reject(signal.reason);
      },
      { once: true },
    );
  });
}
