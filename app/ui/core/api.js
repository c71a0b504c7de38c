/** The service's API: the token, errors with their Retry-After, and vectors as safetensors. */

import { decodeEmbeddings } from "./embeddings.js";
import { askForToken } from "./token.js";

/** The address of the service, also behind a proxy: two folders above this file. */
const SERVICE = new URL("../../", import.meta.url);
const TOKEN = "smart-embedder-token";
const UNAUTHORIZED = 401;

/** An error from the service or a proxy; `status` is 0 if there was no response. */
export class ApiError extends Error {
  constructor(status, code, message, retryAfter = null) {
    super(message);
    Object.assign(this, { status, code, retryAfter });
  }

  /** Whether the same request may succeed later. */
  get isTemporary() {
    return [0, 429, 503].includes(this.status) && this.code !== "model_too_large";
  }

  /** Whether the request succeeds once a model is loaded, so that it is repeated by itself. */
  get isLoading() {
    return this.code === "loading";
  }
}

/** Vectors of `texts` by `model`, one of `Models`; `options` are fields of the request body. */
export async function embed(texts, model, options = {}, how = {}) {
  return decodeEmbeddings(await embedRaw(texts, model, options, how));
}

/** As `embed`, but returns the bytes in safetensors format, for a worker to decode. */
export async function embedRaw(texts, model, options = {}, { signal, background = false } = {}) {
  const headers = { Accept: "application/vnd.safetensors" };
  if (background) headers.Priority = "u=6"; // Bulk: users who wait go first.
  const { path, body } = embedRequest(texts, model, options);
  return (await post(path, body, headers, signal)).arrayBuffer();
}

/** The requests of `embed`, `rerank` and `extract`. */
export const embedRequest = (texts, model, options = {}) => ({
  path: "embeddings",
  body: { sentences: texts, ...named(model), ...options },
});
export const rerankRequest = (query, passages, model) => ({
  path: "rerank",
  body: { query, passages, ...named(model) },
});

export const extractRequest = (texts, model, options = {}) => ({
  path: "extract",
  body: { texts, ...named(model), ...options },
});

/** The full address of a `path`, and whether requests need a token, for exported code. */
export const addressOf = (path) => new URL(path, SERVICE).href;
export const hasToken = () => sessionStorage.getItem(TOKEN) !== null;

/** The field for the type of the texts, if the model reads queries and documents differently. */
export const readAs = (type, { inputTypes }) =>
  inputTypes.includes(type) ? { input_type: type } : {};

/** The field that requests token strings, if the model makes sparse or ColBERT vectors. */
export const withTokens = ({ kinds }) =>
  kinds.some((kind) => kind !== "dense") ? { return_tokens: true } : {};

/** The tokens of each text: `[{id, text, special, start, stop}]`, offsets in code points. */
export async function tokenize(texts, model, { signal } = {}) {
  return (await post(`${pathOf(model)}/tokenize`, { inputs: texts }, {}, signal)).json();
}

/** Scores of passages: `{results: [{index, score}], ...}` by falling score. */
export async function rerank(query, passages, model, { signal } = {}) {
  const { path, body } = rerankRequest(query, passages, model);
  return (await post(path, body, {}, signal)).json();
}

/** The spans of texts: `{data: [{spans: [{text, start, end, label, score}]}], ...}`. */
export async function extract(texts, model, options = {}, { signal } = {}) {
  const { path, body } = extractRequest(texts, model, options);
  return (await post(path, body, {}, signal)).json();
}

/** The field of a request that names its model, unless it is the default. */
export const named = ({ key }) => (key ? { model: key } : {});
const pathOf = ({ tokenizer }) => `models/${encodeURIComponent(tokenizer.split("/").at(-1))}`;

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

/** Sends a request; if a token is needed, asks for it and sends the request again. */
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
    return await fetch(addressOf(path), { ...init, headers });
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
