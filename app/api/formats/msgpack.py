"""Vectors in MessagePack: the JSON answer without its texts, arrays as msgpack-numpy has them.

The library would copy every array into its buffer; they are sent from where they are.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from app.api.formats.answer import EmbeddingAnswer, TextVectors
from app.api.rendering import Chunk
from app.vectors.quantization import QuantizedVectors

# How a string of bytes begins, by the number of bytes in which its length is written.
_BYTES_OF_LENGTH = {1: b"\xc4", 2: b"\xc5", 4: b"\xc6"}


def render(answer: EmbeddingAnswer) -> Iterator[Chunk]:
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
