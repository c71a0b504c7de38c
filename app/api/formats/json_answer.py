"""Vectors in this service's own JSON: numbers, or raw bytes in base64."""

from binascii import b2a_base64
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from app.api.formats.answer import EmbeddingAnswer, TextVectors
from app.api.rendering import (
    OPTIONS,
    render_items,
    render_matrix,
    sparse_as_json,
    text_as_json,
)
from app.engine.types import SparseVector, TokenStrings
from app.vectors.quantization import QuantizedVectors

# Of an array, in one piece: a multiple of three.
_BASE64_BYTES = 3 << 16


def render(answer: EmbeddingAnswer, *, sparse_as_indices: bool, as_base64: bool) -> Iterator[bytes]:
    """The chunks of the answer to an embedding request."""
    yield b'{"data":'
    yield from render_items(
        render_item(
            {"id": index, "text": text_as_json(text)},
            row,
            sparse_as_indices=sparse_as_indices,
            as_base64=as_base64,
        )
        for index, (text, row) in enumerate(zip(answer.texts, answer.vectors(), strict=True))
    )
    is_plain = answer.options.dtype == "float32" and not as_base64
    report = answer.report() if is_plain else answer.typed_report()
    yield b"," + orjson.dumps(report)[1:]


def render_item(
    facts: Mapping[str, Any], row: TextVectors, *, sparse_as_indices: bool, as_base64: bool
) -> Iterator[bytes]:
    """The JSON object of one text: `facts`, its vectors and its tokens."""
    yield orjson.dumps(facts)[:-1] + b',"embeddings":{'
    if as_base64:
        yield from _render_base64(row)
    else:
        yield from _render_numbers(row, sparse_as_indices=sparse_as_indices)
    yield b"}"
    if row.tokens is not None:
        by_id = not (sparse_as_indices or as_base64)
        tokens = _tokens_as_json(row.tokens, row.sparse, by_id=by_id)
        yield b',"tokens":' + orjson.dumps(tokens, option=OPTIONS)
    yield b"}"


def _render_numbers(row: TextVectors, *, sparse_as_indices: bool) -> Iterator[bytes]:
    dense, colbert = row.dense, row.colbert
    yield b'"dense":' + orjson.dumps(None if dense is None else dense.values, option=OPTIONS)
    yield from _render_scales("dense", dense)
    sparse = sparse_as_json(row.sparse, as_indices=sparse_as_indices)
    yield b',"sparse":' + orjson.dumps(sparse, option=OPTIONS)
    yield b',"colbert":'
    yield from render_matrix(None if colbert is None else colbert.values)
    yield from _render_scales("colbert", colbert)
    if row.muvera is not None:
        yield b',"muvera":' + orjson.dumps(row.muvera, option=OPTIONS)


def _render_scales(name: str, vectors: QuantizedVectors | None) -> Iterator[bytes]:
    if vectors is not None and vectors.scales is not None:
        scales: Any = vectors.scales if vectors.scales.ndim else vectors.scales[()]
        yield b',"%s_scale":' % name.encode() + orjson.dumps(scales, option=OPTIONS)


def _render_base64(row: TextVectors) -> Iterator[bytes]:
    for place, (name, values, kind) in enumerate(_arrays(row)):
        yield b"," if place else b""
        yield b'"%s":' % name.encode()
        yield from _as_base64(values, kind)
    yield from _render_scales("dense", row.dense)
    yield from _render_scales("colbert", row.colbert)


def _arrays(row: TextVectors) -> Iterator[tuple[str, Any, str | None]]:
    """The arrays to render in base64, with the name of a number type that numpy does not have."""
    for name, vectors in (("dense", row.dense), ("colbert", row.colbert)):
        values = None if vectors is None else vectors.values
        yield name, values, None if vectors is None else vectors.type_name
    sparse = row.sparse
    yield (
        "sparse",
        None
        if sparse is None
        else {"indices": sparse.indices.astype(np.uint32), "values": sparse.values},
        None,
    )
    if row.muvera is not None:
        yield "muvera", row.muvera, None


def _as_base64(values: Any, kind: str | None) -> Iterator[bytes]:
    if values is None:
        yield b"null"
    elif isinstance(values, dict):
        for place, (name, each) in enumerate(values.items()):
            yield (b"," if place else b"{") + b'"%s":' % name.encode()
            yield from _as_base64(each, None)
        yield b"}"
    else:
        about = orjson.dumps({"dtype": kind or values.dtype.name, "shape": values.shape})
        yield about[:-1] + b',"data":"'
        yield from _base64(values)
        yield b'"}'


def _base64(values: npt.NDArray[Any]) -> Iterator[bytes]:
    """Piece by piece; three bytes make four letters, whatever stands beside them."""
    content = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
    for start in range(0, len(content), _BASE64_BYTES):
        yield b2a_base64(content[start : start + _BASE64_BYTES], newline=False)


def _tokens_as_json(
    strings: TokenStrings, sparse: SparseVector | None, *, by_id: bool
) -> dict[str, Any]:
    """The token strings in the shape of their vectors."""
    names: Any = strings.sparse
    if sparse is not None and strings.sparse is not None and by_id:
        names = dict(zip(sparse.indices.tolist(), strings.sparse, strict=True))
    return {"sparse": names, "colbert": strings.colbert}
