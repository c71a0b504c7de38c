// Calls this service's own operations by types made of its /openapi.json.
import createClient from "openapi-fetch";
import type { components, paths } from "./schema.js";

declare const process: { argv: string[] };

const [baseUrl = "", token = ""] = process.argv.slice(2);
const client = createClient<paths>({ baseUrl, headers: { Authorization: `Bearer ${token}` } });
const texts = ["hybrid search", "bread"];

const body: components["schemas"]["EmbeddingRequest"] = { sentences: texts, sparse_as_indices: true };
const embedded = await client.POST("/embeddings/", { body });
if (embedded.error) throw new Error(embedded.error.detail);
if (typeof embedded.data === "string") throw new Error("safetensors was not asked for");
const dense = embedded.data.data.map(({ embeddings }): number[] => {
  if (!Array.isArray(embeddings.dense)) throw new Error("base64 was not asked for");
  return embeddings.dense;
});

const ranked = await client.POST("/rerank", { body: { query: "search", passages: texts } });
if (ranked.error) throw new Error(ranked.error.detail);
const scores: Array<[number, number]> = ranked.data.results.map(({ index, score }) => [index, score]);

const refused = await client.POST("/rerank", { body: { query: " ", passages: texts } });
const code: string | undefined = refused.error?.code;
console.log(JSON.stringify({ dense, scores, code }));
