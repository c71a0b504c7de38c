"""Vectors in MessagePack: the JSON answer without its texts, arrays as msgpack-numpy has them."""

from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from app.api.formats.answer import EmbeddingAnswer, TextVectors
from app.vectors.quantization import QuantizedVectors


def render(answer: EmbeddingAnswer) -> Iterator[bytes]:
    """The chunks of one object, whose `data` has an object for each text."""
    packer = msgpack.Packer()
    report = answer.typed_report()
    yield packer.pack_map_header(1 + len(report)) + packer.pack("data")
    yield packer.pack_array_header(len(answer.texts))
    for index, row in enumerate(answer.vectors()):
        yield packer.pack(item_of(index, row))
    for name, value in report.items():
        yield packer.pack(name) + packer.pack(value)


def item_of(name: int | str, row: TextVectors) -> dict[str, Any]:
    """The object of one text, whose id is `name`, for a packer."""
    item: dict[str, Any] = {"id": name, "embeddings": dict(_vectors(row))}
    if row.tokens is not None:
        item["tokens"] = {"sparse": row.tokens.sparse, "colbert": row.tokens.colbert}
    return item


def _vectors(row: TextVectors) -> Iterator[tuple[str, Any]]:
    yield from _quantized("dense", row.dense)
    yield (
        "sparse",
        None
        if row.sparse is None
        else {
            "indices": _array(row.sparse.indices.astype(np.uint32)),
            "values": _array(row.sparse.values),
        },
    )
    yield from _quantized("colbert", row.colbert)
    if row.muvera is not None:
        yield "muvera", _array(row.muvera)


def _quantized(name: str, vectors: QuantizedVectors | None) -> Iterator[tuple[str, Any]]:
    yield name, None if vectors is None else _array(vectors.values)
    if vectors is not None and vectors.scales is not None:
        scales = vectors.scales
        yield f"{name}_scale", _array(scales) if scales.ndim else float(scales)


def _array(values: npt.NDArray[Any]) -> dict[bytes, Any]:
    """An array as msgpack-numpy writes it; the keys are bytes."""
    return {
        b"nd": True,
        b"type": values.dtype.str,
        b"kind": b"",
        b"shape": values.shape,
        b"data": np.ascontiguousarray(values).data,
    }
