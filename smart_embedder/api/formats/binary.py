"""Vectors in MessagePack: the JSON answer without its texts, arrays as msgpack-numpy has them.

The library would copy every array into its buffer; they are sent from where they are.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import orjson

from smart_embedder.api.formats.vectors import METADATA_KEY, EmbeddingAnswer, TextVectors
from smart_embedder.api.rendering import Chunk
from smart_embedder.vectors import QuantizedVectors, scales_of

# How a string of bytes begins, by the number of bytes in which its length is written.
_BYTES_OF_LENGTH = {1: b"\xc4", 2: b"\xc5", 4: b"\xc6"}


def render_msgpack(answer: EmbeddingAnswer) -> Iterator[Chunk]:
    """The chunks of one object, whose `data` has an object for each text."""
    packer = msgpack.Packer()
    report = answer.typed_report()
    yield packer.pack_map_header(1 + len(report)) + packer.pack("data")
    yield packer.pack_array_header(len(answer.texts))
    for index, row in enumerate(answer.vectors()):
        yield from pack(packer, item_of(index, row))
    for name, value in report.items():
        yield packer.pack(name) + packer.pack(value)


def item_of(name: int | str, row: TextVectors) -> dict[str, Any]:
    """The object of one text, whose id is `name`, for `pack`."""
    item: dict[str, Any] = {"id": name, "embeddings": dict(_vectors(row))}
    if row.tokens is not None:
        item["tokens"] = {"sparse": row.tokens.sparse, "colbert": row.tokens.colbert}
    return item


def pack(packer: msgpack.Packer, value: Any) -> Iterator[Chunk]:
    """The chunks of a value that may hold arrays."""
    if isinstance(value, Mapping):
        yield packer.pack_map_header(len(value))
        for name, each in value.items():
            yield packer.pack(name)
            yield from pack(packer, each)
    elif isinstance(value, np.ndarray):
        yield from _pack_array(packer, value)
    else:
        yield packer.pack(value)


def _pack_array(packer: msgpack.Packer, values: npt.NDArray[Any]) -> Iterator[Chunk]:
    """An array as msgpack-numpy writes it; the keys are bytes."""
    about = {b"nd": True, b"type": values.dtype.str, b"kind": b"", b"shape": values.shape}
    yield packer.pack_map_header(len(about) + 1)
    yield b"".join(packer.pack(name) + packer.pack(each) for name, each in about.items())
    content = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
    width = next(width for width in _BYTES_OF_LENGTH if len(content) < 1 << 8 * width)
    length = len(content).to_bytes(width, "big")
    yield packer.pack(b"data") + _BYTES_OF_LENGTH[width] + length
    yield content


def _vectors(row: TextVectors) -> Iterator[tuple[str, Any]]:
    yield from _quantized("dense", row.dense)
    sparse = row.sparse
    yield (
        "sparse",
        None
        if sparse is None
        else {"indices": sparse.indices.astype(np.uint32), "values": sparse.values},
    )
    yield from _quantized("colbert", row.colbert)
    if row.muvera is not None:
        yield "muvera", row.muvera


def _quantized(name: str, vectors: QuantizedVectors | None) -> Iterator[tuple[str, Any]]:
    yield name, None if vectors is None else vectors.values
    if vectors is not None and vectors.scales is not None:
        scales = vectors.scales
        yield f"{name}_scale", scales if scales.ndim else float(scales)


_ALIGNMENT = 8
_TYPES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int8": "I8",
    "uint8": "U8",
    "int64": "I64",
    "uint32": "U32",
}

TensorChunk = npt.NDArray[Any]


class _Tensor:
    """A tensor given as chunks, which are concatenated along the first dimension."""

    def __init__(
        self, name: str, chunks: Sequence[TensorChunk], type_name: str | None = None
    ) -> None:
        self.name = name
        self.chunks = [np.ascontiguousarray(chunk) for chunk in chunks]
        self.type = _TYPES[type_name or self.chunks[0].dtype.name]
        self.shape = [sum(map(len, chunks)), *chunks[0].shape[1:]]
        self.bytes = sum(chunk.nbytes for chunk in self.chunks)


def render_safetensors(answer: EmbeddingAnswer) -> Iterator[bytes | memoryview]:
    """One file for the whole answer."""
    rows = list(answer.vectors())
    metadata = answer.typed_report()
    if rows[0].tokens is not None:
        metadata["tokens"] = [row.tokens for row in rows]
    yield from file_of(rows, metadata)


def file_of(
    rows: Sequence[TextVectors], metadata: Mapping[str, Any]
) -> Iterator[bytes | memoryview]:
    """The header, which holds `metadata` as JSON, then every tensor of `rows`."""
    # The largest numbers first, so that all are aligned.
    tensors = sorted(_tensors(rows), key=lambda each: -each.chunks[0].itemsize)
    yield _header(tensors, orjson.dumps(metadata).decode())
    for tensor in tensors:
        for chunk in tensor.chunks:
            if chunk.size:
                yield chunk.data.cast("B")


def _header(tensors: Sequence[_Tensor], metadata: str) -> bytes:
    header: dict[str, Any] = {"__metadata__": {METADATA_KEY: metadata}}
    ends = accumulate((tensor.bytes for tensor in tensors), initial=0)
    for tensor, begin in zip(tensors, ends, strict=False):
        offsets = [begin, begin + tensor.bytes]
        header[tensor.name] = {
            "dtype": tensor.type,
            "shape": tensor.shape,
            "data_offsets": offsets,
        }
    text = orjson.dumps(header)
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _tensors(rows: Sequence[TextVectors]) -> Iterator[_Tensor]:
    dense = [row.dense for row in rows if row.dense is not None]
    if dense:
        yield _Tensor("dense", [each.values[None] for each in dense], dense[0].type_name)
        yield from _scales("dense_scale", dense)
    sparse = [row.sparse for row in rows if row.sparse is not None]
    if sparse:
        yield _Tensor("sparse_offsets", [_offsets([len(each.values) for each in sparse])])
        indices = np.concatenate([each.indices for each in sparse])
        yield _Tensor("sparse_indices", [indices.astype(np.uint32)])
        yield _Tensor("sparse_values", [each.values for each in sparse])
    colbert = [row.colbert for row in rows if row.colbert is not None]
    if colbert:
        yield _Tensor("colbert_offsets", [_offsets([len(each.values) for each in colbert])])
        yield _Tensor("colbert", [each.values for each in colbert], colbert[0].type_name)
        yield from _scales("colbert_scale", colbert)
    muvera = [row.muvera for row in rows if row.muvera is not None]
    if muvera:
        yield _Tensor("muvera", [each[None] for each in muvera])


def _scales(name: str, vectors: Sequence[QuantizedVectors]) -> Iterator[_Tensor]:
    scales = scales_of(vectors)
    if scales is not None:
        yield _Tensor(name, [scales])


def _offsets(sizes: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.fromiter(accumulate(sizes, initial=0), np.int64)
