"""Vectors in the safetensors format: a few tensors that hold the vectors of all texts.

The library's writer copies every tensor twice. The format is a length, a JSON header and the
tensors' bytes, which are sent from where they are.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from app.api.formats.answer import METADATA_KEY, EmbeddingAnswer, TextVectors
from app.vectors.quantization import QuantizedVectors, scales_of

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

Chunk = npt.NDArray[Any]


class _Tensor:
    """A tensor given as chunks, which are concatenated along the first dimension."""

    def __init__(self, name: str, chunks: Sequence[Chunk], type_name: str | None = None) -> None:
        self.name = name
        self.chunks = [np.ascontiguousarray(chunk) for chunk in chunks]
        self.type = _TYPES[type_name or self.chunks[0].dtype.name]
        self.shape = [sum(map(len, chunks)), *chunks[0].shape[1:]]
        self.bytes = sum(chunk.nbytes for chunk in self.chunks)


def render(answer: EmbeddingAnswer) -> Iterator[bytes | memoryview]:
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
