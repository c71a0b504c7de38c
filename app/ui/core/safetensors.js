/** Reads the safetensors format: a length, a JSON header, and the bytes of the tensors. */

const LENGTH_BYTES = 8;
const ARRAYS = {
  F32: Float32Array,
  F16: Uint16Array, // The bits of each number, because few browsers have Float16Array.
  I8: Int8Array,
  U8: Uint8Array,
  U32: Uint32Array,
  I64: BigInt64Array,
};

/**
 * `{tensors: {name: {shape, values}}, metadata}`. Values are views of `buffer`; 64-bit integers
 * become ordinary numbers.
 */
export function decodeSafetensors(buffer) {
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  const text = new TextDecoder().decode(new Uint8Array(buffer, LENGTH_BYTES, length));
  const { __metadata__: metadata = {}, ...entries } = JSON.parse(text);
  const tensors = {};
  for (const [
    name,
    {
      dtype,
      shape,
      data_offsets: [begin, end],
    },
  ] of Object.entries(entries)) {
    const Values = ARRAYS[dtype];
    if (!Values) throw new TypeError(`tensors of type ${dtype} are not read`);
    const start = LENGTH_BYTES + length + begin;
    const values = new Values(buffer, start, (end - begin) / Values.BYTES_PER_ELEMENT);
    tensors[name] = { shape, values: dtype === "I64" ? Array.from(values, Number) : values };
  }
  return { tensors, metadata };
}
