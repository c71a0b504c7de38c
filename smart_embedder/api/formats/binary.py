"""Vectors in MessagePack, as msgpack-numpy has arrays, and in safetensors.

MessagePack's is the JSON answer without its texts. The libraries would copy every array into their
buffers; they are sent from where they are.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt
import orjson

from smart_embedder.api.formats.vectors import METADATA_KEY, EmbeddingAnswer, TextVectors
from smart_embedder.api.rendering import Chunk
from smart_embedder.vectors import QuantizedVectors, scales_of

# How a string of bytes begins, by the number of bytes in which its length is written.
_BYTES_OF_LENGTH = {1: b"\xc4", 2: b"\xc5", 4: b"\xc6"}
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


def render_msgpack(answer: EmbeddingAnswer) -> Iterator[Chunk]:
    """The chunks of one object, whose `data` has an object for each text."""
    packer = msgpack.Packer()
    report = answer.report()
    yield packer.pack_map_header(1 + len(report)) + packer.pack("data")
    yield packer.pack_array_header(len(answer.request.texts))
    for index, row in enumerate(answer.vectors()):
        yield from pack(packer, item_of(index, row))
    for name, value in report.items():
        yield packer.pack(name) + packer.pack(value)


def item_of(name: int | str, row: TextVectors) -> dict[str, Any]:
    """The object of one text, whose id is `name`, for `pack`."""
    vectors = _arrays("dense", row.dense)
    vectors["sparse"] = row.sparse and {
        "indices": row.sparse.indices.astype(np.uint32),
        "values": row.sparse.values,
    }
    vectors |= _arrays("colbert", row.colbert)
    if row.muvera is not None:
        vectors["muvera"] = row.muvera
    item: dict[str, Any] = {"id": name, "embeddings": vectors}
    if row.tokens is not None:
        item["tokens"] = {"sparse": row.tokens.sparse, "colbert": row.tokens.colbert}
    return item


def _arrays(name: str, vectors: QuantizedVectors | None) -> dict[str, Any]:
    if vectors is None:
        return {name: None}
    scales = vectors.scales
    if scales is None:
        return {name: vectors.values}
    return {name: vectors.values, f"{name}_scale": scales if scales.ndim else float(scales)}


def pack(packer: msgpack.Packer, value: Any) -> Iterator[Chunk]:
    """The chunks of a value that may hold arrays."""
    if isinstance(value, Mapping):
        yield packer.pack_map_header(len(value))
        for name, each in value.items():
            yield packer.pack(name)
            yield from pack(packer, each)
    elif isinstance(value, np.ndarray):
        # As msgpack-numpy writes it; the keys are bytes.
        about = {b"nd": True, b"type": value.dtype.str, b"kind": b"", b"shape": value.shape}
        yield packer.pack_map_header(len(about) + 1)
        yield b"".join(packer.pack(name) + packer.pack(each) for name, each in about.items())
        content = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
        width = next(width for width in _BYTES_OF_LENGTH if len(content) < 1 << 8 * width)
        length = len(content).to_bytes(width, "big")
        yield packer.pack(b"data") + _BYTES_OF_LENGTH[width] + length
        yield content
    else:
        yield packer.pack(value)


class _Tensor(NamedTuple):
    """A tensor given as chunks, which are concatenated along the first dimension."""

    name: str
    chunks: Sequence[npt.NDArray[Any]]
    type_name: str


def render_safetensors(answer: EmbeddingAnswer) -> Iterator[Chunk]:
    """One file for the whole answer."""
    rows = list(answer.vectors())
    metadata = answer.report()
    if rows[0].tokens is not None:
        metadata["tokens"] = [row.tokens for row in rows]
    yield from file_of(rows, metadata)


def file_of(rows: Sequence[TextVectors], metadata: Mapping[str, Any]) -> Iterator[Chunk]:
    """The header, which holds `metadata` as JSON, then every tensor of `rows`."""
    # The largest numbers first, so that all are aligned.
    tensors = sorted(_tensors(rows), key=lambda each: -each.chunks[0].itemsize)
    header: dict[str, Any] = {"__metadata__": {METADATA_KEY: orjson.dumps(metadata).decode()}}
    end = 0
    for name, chunks, type_name in tensors:
        begin, end = end, end + sum(chunk.nbytes for chunk in chunks)
        shape = [sum(map(len, chunks)), *chunks[0].shape[1:]]
        header[name] = {"dtype": _TYPES[type_name], "shape": shape, "data_offsets": [begin, end]}
    text = orjson.dumps(header)
    text += b" " * (-len(text) % _ALIGNMENT)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors:
        for chunk in tensor.chunks:
            if chunk.size:
                yield np.ascontiguousarray(chunk).data.cast("B")


def _tensors(rows: Sequence[TextVectors]) -> Iterator[_Tensor]:
    dense = [row.dense for row in rows if row.dense is not None]
    if dense:
        yield _Tensor("dense", [each.values[None] for each in dense], dense[0].type_name)
    sparse = [row.sparse for row in rows if row.sparse is not None]
    if sparse:
        yield _offsets("sparse", [len(each.values) for each in sparse])
        indices = np.concatenate([each.indices for each in sparse])
        yield _Tensor("sparse_indices", [indices.astype(np.uint32)], "uint32")
        yield _Tensor("sparse_values", [each.values for each in sparse], "float32")
    colbert = [row.colbert for row in rows if row.colbert is not None]
    if colbert:
        yield _offsets("colbert", [len(each.values) for each in colbert])
        yield _Tensor("colbert", [each.values for each in colbert], colbert[0].type_name)
    for name, vectors in (("dense", dense), ("colbert", colbert)):
        if (scales := scales_of(vectors)) is not None:
            yield _Tensor(f"{name}_scale", [scales], "float32")
    muvera = [row.muvera for row in rows if row.muvera is not None]
    if muvera:
        yield _Tensor("muvera", [each[None] for each in muvera], "float32")


def _offsets(name: str, sizes: Sequence[int]) -> _Tensor:
    offsets = np.fromiter(accumulate(sizes, initial=0), np.int64)
    return _Tensor(f"{name}_offsets", [offsets], "int64")
