"""Renders vectors as safetensors, and chooses between it and JSON by the Accept header.

The safetensors library would copy every array into a buffer; here the arrays are sent uncopied.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
from starlette.requests import Request

from app.answers import JSON, METADATA_KEY, Chunk, EmbeddingAnswer, TextVectors
from app.headers import choose_preferred, read_preference
from smart_embedder.vectors import join_scales

SAFETENSORS = "application/vnd.safetensors"
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


def media_type_of(request: Request) -> str:
    """JSON or safetensors, as the request prefers; JSON by default."""
    return choose_preferred(read_preference(request.headers, "accept"), (JSON, SAFETENSORS)) or JSON


class _Tensor(NamedTuple):
    """A tensor in chunks, which are concatenated along the first dimension."""

    name: str
    chunks: Sequence[npt.NDArray[Any]]
    type_name: str


def render_safetensors(answer: EmbeddingAnswer) -> Iterator[Chunk]:
    """Render one file: the header, with the report as JSON in its metadata, then the tensors."""
    rows = list(answer.vectors())
    metadata = answer.report()
    if rows[0].tokens is not None:
        metadata["tokens"] = [row.tokens for row in rows]
    # Those with the largest numbers first, so that all are aligned.
    tensors = sorted(_tensors(rows), key=lambda tensor: -tensor.chunks[0].itemsize)
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
        yield _Tensor("dense", [vector.values[None] for vector in dense], dense[0].type_name)
    sparse = [row.sparse for row in rows if row.sparse is not None]
    if sparse:
        yield _offsets("sparse", [len(vector.values) for vector in sparse])
        indices = np.concatenate([vector.indices for vector in sparse])
        yield _Tensor("sparse_indices", [indices.astype(np.uint32)], "uint32")
        yield _Tensor("sparse_values", [vector.values for vector in sparse], "float32")
    colbert = [row.colbert for row in rows if row.colbert is not None]
    if colbert:
        yield _offsets("colbert", [len(matrix.values) for matrix in colbert])
        yield _Tensor("colbert", [matrix.values for matrix in colbert], colbert[0].type_name)
    for name, vectors in (("dense", dense), ("colbert", colbert)):
        if (scales := join_scales(vectors)) is not None:
            yield _Tensor(f"{name}_scale", [scales], "float32")
    muvera = [row.muvera for row in rows if row.muvera is not None]
    if muvera:
        yield _Tensor("muvera", [vector[None] for vector in muvera], "float32")


def _offsets(name: str, sizes: Sequence[int]) -> _Tensor:
    offsets = np.fromiter(accumulate(sizes, initial=0), np.int64)
    return _Tensor(f"{name}_offsets", [offsets], "int64")
