/** Decodes a response of /embeddings in safetensors, text by text. */

import { decodeSafetensors } from "./safetensors.js";

const METADATA = "smart-embedder";

/**
 * `{report, texts}`. `report` has the fields of the JSON response besides `data`. Each text has
 * `dense` and `colbert` as matrices `{rows, width, values, scales}`, where `scales` is null or holds a
 * factor for each row, and `sparse` as `{indices, values}`; a kind that was not requested is null.
 * Their `bytes` are those of the response, before float16 and signs are expanded to numbers.
 * `strings` has the token strings of `{sparse, colbert}`, if they were requested.
 */
export function decodeEmbeddings(buffer) {
  const { tensors, metadata } = decodeSafetensors(buffer);
  const { dense, dense_scale: denseScale, colbert, colbert_scale: colbertScale } = tensors;
  const report = JSON.parse(metadata[METADATA]);
  const restore = RESTORED[report.output_dtype] ?? ((numbers) => numbers);
  const denseOf = (i) => restore(matrix(dense, denseScale, i, i + 1));
  const colbertOf = (i) => restore(matrix(colbert, colbertScale, ...span(tensors.colbert_offsets, i)));
  const length =
    dense?.shape[0] ?? (tensors.sparse_offsets ?? tensors.colbert_offsets).shape[0] - 1;
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
  const scales = scale?.values.subarray(begin, end) ?? null;
  const bytes = values.byteLength + (scales?.byteLength ?? 0);
  return { rows: end - begin, width, values, scales, bytes };
}

/** Functions that expand a matrix of bits to numbers, by the name of the format. */
const RESTORED = {
  float16(matrix) {
    // A float32 has the same mantissa bits, and an exponent that is larger by 112.
    const wide = Uint32Array.from(matrix.values, (half) => ((half & 0x8000) << 16) | ((half & 0x7fff) << 13));
    return { ...matrix, values: new Float32Array(wide.buffer).map((number) => number * 2 ** 112) };
  },
  /** The signs as vectors of equal length. */
  ubinary({ values: bits, ...matrix }) {
    const width = matrix.width * 8;
    const values = new Int8Array(bits.length * 8);
    for (let i = 0; i < values.length; i++) values[i] = (bits[i >> 3] >> (7 - (i & 7))) & 1 ? 1 : -1;
    const scales = new Float32Array(matrix.rows).fill(1 / Math.sqrt(width));
    return { ...matrix, width, values, scales };
  },
};

function sparseOf(tensors, i) {
  const [begin, end] = span(tensors.sparse_offsets, i);
  const indices = tensors.sparse_indices.values.subarray(begin, end);
  const values = tensors.sparse_values.values.subarray(begin, end);
  return { indices, values, bytes: indices.byteLength + values.byteLength };
}
