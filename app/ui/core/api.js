/** The service's API: the token, errors with their Retry-After, and vectors as safetensors. */

import { decodeEmbeddings } from "./embeddings.js";
import { askForToken } from "./token.js";

/** The address of the service, wherever a proxy has put it: two folders above this file. */
const SERVICE = new URL("../../", import.meta.url);
const TOKEN = "smart-embedder-token";
const UNAUTHORIZED = 401;
const UNPROCESSABLE = 422;

/** What the service, or the way to it, answered instead of a result. `status` 0: nobody answered. */
export class ApiError extends Error {
  constructor(status, code, message, retryAfter = null) {
    super(message);
    Object.assign(this, { status, code, retryAfter });
  }

  /** Whether the same request may succeed later. */
  get isTemporary() {
    return this.status === 0 || this.status === 429 || this.status === 503;
  }
}

/** Vectors of `texts`; `options` are fields of the request body. Numbers arrive as raw bytes. */
export async function embed(texts, options = {}, { signal, background } = {}) {
  return decodeEmbeddings(await embedRaw(texts, options, { signal, background }));
}

/** The same as bytes of the safetensors format, for a worker to decode. */
export async function embedRaw(texts, options = {}, { signal, background = false } = {}) {
  const headers = { Accept: "application/vnd.safetensors" };
  if (background) headers.Priority = "u=6"; // Leave the device to those who wait.
  const response = await post("embeddings", { sentences: texts, ...options }, headers, signal);
  return response.arrayBuffer();
}

/** The vectors of one query, which Qwen3-Embedding reads behind an instruction of its own. */
export async function embedQuery(query, health, { signal } = {}) {
  if (health.dense_embedding_model === health.model) return embed([query], {}, { signal });
  try {
    return await embed([query], { input_type: "query" }, { signal });
  } catch (error) {
    if (error.status !== UNPROCESSABLE) throw error;
    return embed([query], {}, { signal }); // The model has no such instruction.
  }
}

/** The tokens of each text: `[{id, text, special, start, stop}]`, offsets in code points. */
export async function tokenize(texts, health, { signal } = {}) {
  // Of the model behind sparse and ColBERT vectors; its name ends in a part without a slash.
  const model = encodeURIComponent(health.model.split("/").at(-1));
  const body = { inputs: texts };
  return (await post(`models/${model}/tokenize`, body, {}, signal)).json();
}

/** Scores of passages: `{results: [{index, score}], ...}` by falling score. */
export async function rerank(query, passages, { signal } = {}) {
  return (await post("rerank", { query, passages }, {}, signal)).json();
}

/** /health, whatever its status. */
export const getHealth = async (signal) => (await send("health", { signal })).json();
export const getStats = async (signal) => (await get("stats", signal)).json();
export const getMetrics = async (signal) => (await get("metrics", signal)).text();

async function get(path, signal) {
  return checked(await send(path, { signal }));
}

async function post(path, body, headers, signal) {
  const init = {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers },
    body: JSON.stringify(body),
    signal,
  };
  return checked(await send(path, init));
}

/** Sends a request; where a token is needed, asks for it and sends the request again. */
async function send(path, init) {
  for (;;) {
    const token = sessionStorage.getItem(TOKEN);
    const response = await fetchWith(token, path, init);
    if (response.status !== UNAUTHORIZED) return response;
    if (sessionStorage.getItem(TOKEN) !== token) continue; // Another request was faster.
    sessionStorage.setItem(TOKEN, await tokenFromUser(token !== null));
  }
}

async function tokenFromUser(wasWrong) {
  const token = await askForToken(wasWrong);
  if (token === null) throw new ApiError(UNAUTHORIZED, "unauthorized", "A token is needed.");
  return token;
}

async function fetchWith(token, path, init) {
  const headers =
    token === null ? init.headers : { ...init.headers, Authorization: `Bearer ${token}` };
  try {
    return await fetch(new URL(path, SERVICE), { ...init, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "unreachable", "The server does not answer.");
  }
}

async function checked(response) {
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  const detail = body.detail ?? body.error ?? `The server answered ${response.status}.`;
  const retryAfter = Number(response.headers.get("Retry-After")) || null;
  throw new ApiError(response.status, body.code ?? "unknown", detail, retryAfter);
}
