/** The answer of /embeddings in safetensors, text by text. */

import { decodeSafetensors } from "./safetensors.js";

const METADATA = "smart-embedder";

/**
 * `{report, texts}`. `report` has the fields of the JSON answer beside `data`. Each text has
 * `dense` and `colbert` as matrices `{rows, width, values, scales}`, where `scales` holds a factor
 * for each row or is null, and `sparse` as `{indices, values}`; a kind that was not asked for is null.
 * `strings` has the vocabulary's strings behind both, `{sparse, colbert}`, where they were asked for.
 */
export function decodeEmbeddings(buffer) {
  const { tensors, metadata } = decodeSafetensors(buffer);
  const { dense, dense_scale: denseScale, colbert, colbert_scale: colbertScale } = tensors;
  const denseOf = (i) => matrix(dense, denseScale, i, i + 1);
  const colbertOf = (i) => matrix(colbert, colbertScale, ...span(tensors.colbert_offsets, i));
  const length =
    dense?.shape[0] ?? (tensors.sparse_offsets ?? tensors.colbert_offsets).shape[0] - 1;
  const report = JSON.parse(metadata[METADATA]);
  const texts = Array.from({ length }, (_, i) => ({
    dense: dense ? denseOf(i) : null,
    sparse: tensors.sparse_offsets ? sparseOf(tensors, i) : null,
    colbert: colbert ? colbertOf(i) : null,
    strings: report.tokens?.[i] ?? null,
  }));
  return { report, texts };
}

const span = (offsets, i) => offsets.values.slice(i, i + 2);

function matrix(tensor, scale, begin, end) {
  const width = tensor.shape[1];
  const values = tensor.values.subarray(begin * width, end * width);
  return { rows: end - begin, width, values, scales: scale?.values.subarray(begin, end) ?? null };
}

function sparseOf(tensors, i) {
  const [begin, end] = span(tensors.sparse_offsets, i);
  return {
    indices: tensors.sparse_indices.values.subarray(begin, end),
    values: tensors.sparse_values.values.subarray(begin, end),
  };
}
