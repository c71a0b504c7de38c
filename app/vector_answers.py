"""The answer with vectors before it is rendered: the engine's result and the request's options."""

from binascii import b2a_base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from app import answers as rendering
from app.answers import report
from smart_embedder import requests as records
from smart_embedder.results import (
    EmbeddingResult,
    FloatArray,
    SparseVector,
    TextEmbedding,
    TokenStrings,
)
from smart_embedder.vectors import (
    MUVERA_WIDTH,
    QuantizedVectors,
    muvera_of,
    pool,
    pooling_bytes,
    quantize,
)

# Under which formats with metadata hold the report, as JSON.
METADATA_KEY = "smart-embedder"
# An index and a value.
_WEIGHT_BYTES = 4 + 4
# Of an array, in one piece: a multiple of three.
_BASE64_BYTES = 3 << 16


def hold_rendering(
    embeddings: Sequence[TextEmbedding],
    request: records.EmbedRequest,
    memory: records.AnswerMemory,
    *,
    at_once: bool = False,
) -> None:
    """Hold, as `AnswerMemory.need`, what rendering takes of one text or of all `at_once`."""
    working = made = 0
    for each in embeddings:
        if request.colbert_pool_factor is not None and each.colbert is not None:
            working = max(working, pooling_bytes(len(each.colbert)))
        size = 0 if request.output_dtype == "float32" else each.nbytes // 2
        size += 0 if request.muvera is None else 4 * MUVERA_WIDTH
        made = made + size if at_once else max(made, size)
    advice = "send shorter texts, or leave out colbert_pool_factor"
    memory.need_more(working + made, "the vectors and what is made of them", advice)


@dataclass(frozen=True, slots=True)
class TextVectors:
    """The post-processed vectors of one text; None for a kind not asked for."""

    dense: QuantizedVectors | None
    sparse: SparseVector | None
    colbert: QuantizedVectors | None
    muvera: FloatArray | None
    tokens: TokenStrings | None

    @property
    def nbytes(self) -> int:
        """Their approximate size in bytes, without the strings."""
        vectors = [each.values.nbytes for each in (self.dense, self.colbert) if each is not None]
        sparse = 0 if self.sparse is None else self.sparse.indices.size * _WEIGHT_BYTES
        return sum(vectors) + sparse + (0 if self.muvera is None else self.muvera.nbytes)


@dataclass(frozen=True, slots=True)
class EmbeddingAnswer:
    """An answer before it is rendered; `made_by` tells what made each kind of vectors."""

    request: records.EmbedRequest
    result: EmbeddingResult
    made_by: Mapping[str, Any]

    def vectors(self) -> Iterator[TextVectors]:
        """The vectors of each text, post-processed one by one while the answer is rendered."""
        strings = self.result.token_strings or repeat(None, len(self.request.texts))
        for embedding, tokens in zip(self.result.embeddings, strings, strict=True):
            yield vectors_of(embedding, self.request, tokens)

    def report(self) -> dict[str, Any]:
        """The fields beside vectors: models, usage, times, warnings and the type of the numbers."""
        return {**self.made_by, **report(self.result), "output_dtype": self.request.output_dtype}


def vectors_of(
    embedding: TextEmbedding,
    request: records.EmbedRequest,
    tokens: TokenStrings | None = None,
) -> TextVectors:
    """Post-process the vectors of one text."""
    dense, colbert, muvera = embedding.dense, embedding.colbert, None
    if colbert is not None and request.muvera is not None:
        muvera = muvera_of(colbert.shape[1]).encode(colbert, request.muvera)
    if not request.outputs.colbert:
        colbert = None
    if colbert is not None and request.colbert_pool_factor is not None:
        colbert = pool(colbert, request.colbert_pool_factor)
    return TextVectors(
        dense=None if dense is None else quantize(dense, request.output_dtype),
        sparse=embedding.sparse,
        colbert=None if colbert is None else quantize(colbert, request.output_dtype),
        muvera=muvera,
        tokens=tokens,
    )


def render(answer: EmbeddingAnswer, *, sparse_as_indices: bool, as_base64: bool) -> Iterator[bytes]:
    """The chunks of the answer to an embedding request."""
    yield b'{"data":['
    texts = answer.request.texts
    for index, (text, row) in enumerate(zip(texts, answer.vectors(), strict=True)):
        if index:
            yield b","
        facts = {"id": index, "text": rendering.text_as_json(text)}
        yield from render_item(facts, row, sparse_as_indices=sparse_as_indices, as_base64=as_base64)
    told = answer.report()
    if answer.request.output_dtype == "float32" and not as_base64:
        del told["output_dtype"]
    yield b"]," + orjson.dumps(told)[1:]


def render_item(
    facts: Mapping[str, Any], row: TextVectors, *, sparse_as_indices: bool, as_base64: bool
) -> Iterator[bytes]:
    """The JSON object of one text: `facts`, its vectors and its tokens."""
    sparse = row.sparse
    yield orjson.dumps(facts)[:-1] + b',"embeddings":{'
    yield from render_vectors("dense", row.dense, as_base64=as_base64)
    yield b',"sparse":'
    if as_base64 and sparse is not None:
        yield b'{"indices":'
        yield from _as_base64(sparse.indices.astype(np.uint32))
        yield b',"values":'
        yield from _as_base64(sparse.values)
        yield b"}"
    else:
        weights = rendering.sparse_as_json(sparse, as_indices=sparse_as_indices)
        yield orjson.dumps(weights, option=rendering.OPTIONS)
    yield b","
    yield from render_vectors("colbert", row.colbert, as_base64=as_base64)
    if row.muvera is not None:
        yield b',"muvera":'
        if as_base64:
            yield from _as_base64(row.muvera)
        else:
            yield orjson.dumps(row.muvera, option=rendering.OPTIONS)
    yield b"}"
    if row.tokens is not None:
        names: Any = row.tokens.sparse
        if names is not None and sparse is not None and not (sparse_as_indices or as_base64):
            names = dict(zip(sparse.indices.tolist(), names, strict=True))
        tokens = {"sparse": names, "colbert": row.tokens.colbert}
        yield b',"tokens":' + orjson.dumps(tokens, option=rendering.OPTIONS)
    yield b"}"


def render_vectors(
    name: str, vectors: QuantizedVectors | None, *, as_base64: bool = False
) -> Iterator[bytes]:
    """The field `name` of an object, and its scales where the type of the numbers has some."""
    yield b'"%s":' % name.encode()
    if vectors is None:
        yield b"null"
        return
    if as_base64:
        yield from _as_base64(vectors.values, vectors.type_name)
    elif vectors.values.ndim == 1:
        yield orjson.dumps(vectors.values, option=rendering.OPTIONS)
    else:
        yield from rendering.render_matrix(vectors.values)
    if vectors.scales is not None:
        # orjson takes no array without dimensions.
        scales = vectors.scales if vectors.scales.ndim else vectors.scales[()]
        yield b',"%s_scale":' % name.encode() + orjson.dumps(scales, option=rendering.OPTIONS)


def _as_base64(values: npt.NDArray[Any], type_name: str | None = None) -> Iterator[bytes]:
    """Piece by piece; three bytes make four letters, whatever stands beside them."""
    about = orjson.dumps({"dtype": type_name or values.dtype.name, "shape": values.shape})
    yield about[:-1] + b',"data":"'
    content = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
    for start in range(0, len(content), _BASE64_BYTES):
        yield b2a_base64(content[start : start + _BASE64_BYTES], newline=False)
    yield b'"}'
