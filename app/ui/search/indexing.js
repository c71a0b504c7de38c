/** Sends passages to the service in batches, and their vectors to the index. */

import { embedRaw, readAs } from "../core/api.js";
import { inputOf } from "./pictures.js";

const REQUESTS_AT_ONCE = 2;
/** Passages in a request: more if responses are fast, so that progress remains visible. */
const PASSAGES = { first: 8, fewest: 4, most: 64 };
const SECONDS = { soon: 0.5, late: 2 };
const RETRY_SECONDS = 2;
/** The statuses of the service's answers about a picture that is too large or damaged. */
const REFUSED = [413, 422];
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
 * Adds the vectors of `passages` by `model`, in a number format of the service, to the `index`. Ends
 * early when `given` is aborted or a request fails. Calls `onProgress({done, total, bytes})` after each
 * request, and `onWait(seconds, error)` before it repeats one that was refused for now. A picture that
 * the service refuses has no vectors, and the sentence of the service as its `refusal`.
 */
export async function indexPassages(passages, index, model, format, how) {
  const { signal: given, onProgress, onWait } = how;
  const texts = passages.map(({ text }) => text);
  const options = optionsFor(texts, model, format);
  const failed = new AbortController();
  const signal = AbortSignal.any([given, failed.signal]);
  let next = 0;
  let done = 0;
  let size = PASSAGES.first;

  const sendSome = async () => {
    while (next < passages.length) {
      const first = next;
      const part = partOf(passages, first, size);
      next += part.length;
      const [{ file }] = part;
      const inputs = await Promise.all(part.map(inputOf));
      const send = () => timed(embedRaw(inputs, model, options, { signal, background: true }));
      const answer = retry(send, signal, onWait);
      const { seconds, buffer } = await (file ? unlessRefused(part[0], model, answer) : answer);
      if (!buffer) continue;
      if (!file) size = sizeAfter(part.length, seconds);
      signal.throwIfAborted(); // The index may be closed by now.
      const { bytes } = await index.add(first, buffer);
      done += part.length;
      onProgress({ done, total: passages.length, bytes });
    }
  };
  try {
    await Promise.all(Array.from({ length: REQUESTS_AT_ONCE }, sendSome));
  } finally {
    failed.abort();
  }
}

/** The passages of a request: up to `size` texts, or one picture, so that it alone may be refused. */
function partOf(passages, first, size) {
  if (passages[first].file) return [passages[first]];
  const part = passages.slice(first, first + size);
  const picture = part.findIndex(({ file }) => file);
  return picture < 0 ? part : part.slice(0, picture);
}

/** The answer about a picture; nothing if the service refuses it, though the model reads pictures. */
async function unlessRefused(passage, model, answer) {
  try {
    return await answer;
  } catch (error) {
    if (!model.readsImages || !REFUSED.includes(error.status)) throw error;
    passage.refusal = error.message;
    return {};
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
