"""The answer with vectors before it is rendered: the engine's result and the request's options."""

from binascii import b2a_base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from smart_embedder.api.rendering import (
    OPTIONS,
    render_items,
    render_matrix,
    report,
    sparse_as_json,
    text_as_json,
)
from smart_embedder.engine.checks import AnswerMemory
from smart_embedder.engine.records import (
    EmbeddingResult,
    FloatArray,
    Outputs,
    SparseVector,
    TextEmbedding,
    TokenStrings,
)
from smart_embedder.errors import InvalidRequestError
from smart_embedder.vectors import (
    MUVERA_WIDTH,
    MuveraSide,
    OutputDtype,
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


@dataclass(frozen=True, slots=True)
class ModelNames:
    """Which model made which kind of vector."""

    dense: str
    sparse: str
    colbert: str

    def as_json(self) -> dict[str, Any]:
        """The fields of an answer."""
        return {
            "model_name": self.dense,
            "dense_model_name": self.dense,
            "sparse_model_name": self.sparse,
            "colbert_model_name": self.colbert,
        }


@dataclass(frozen=True, slots=True)
class VectorOptions:
    """How the vectors of a result are post-processed; `outputs` are the kinds in the answer.

    `dtype` applies to dense and ColBERT vectors. `pool_factor` reduces the number of ColBERT
    vectors by about that factor. `muvera` adds one vector that represents all ColBERT vectors of a
    text before pooling and quantization.
    """

    outputs: Outputs
    dtype: OutputDtype = "float32"
    pool_factor: int | None = None
    muvera: MuveraSide | None = None

    @property
    def needed(self) -> Outputs:
        """The kinds that the engine must compute."""
        return replace(self.outputs, colbert=self.outputs.colbert or self.muvera is not None)

    def working_bytes(self, embedding: TextEmbedding) -> int:
        """What post-processing one text takes beside its result."""
        if self.pool_factor is None or embedding.colbert is None:
            return 0
        return pooling_bytes(len(embedding.colbert))

    def made_bytes(self, embedding: TextEmbedding) -> int:
        """At most what the vectors of a text hold beside those that they are made of."""
        muvera = 0 if self.muvera is None else 4 * MUVERA_WIDTH
        return muvera + (0 if self.dtype == "float32" else embedding.nbytes // 2)

    def hold(
        self, embeddings: Sequence[TextEmbedding], memory: AnswerMemory, *, at_once: bool = False
    ) -> None:
        """Hold what post-processing takes, of one text after the other or of all `at_once`.

        Raises as `AnswerMemory.need`.
        """
        size = max(map(self.working_bytes, embeddings), default=0)
        size += (sum if at_once else max)([0, *map(self.made_bytes, embeddings)])
        advice = "send shorter texts, or leave out colbert_pool_factor"
        memory.need_more(size, "the vectors and what is made of them", advice)

    def check(self, *, queries: bool = False, tokens: bool = False) -> None:
        """Raise `InvalidRequestError` for options that have no effect or contradict each other.

        `queries` says whether the texts are queries, `tokens` whether token strings are wanted.
        """
        if self.dtype != "float32" and not (self.outputs.dense or self.outputs.colbert):
            raise InvalidRequestError(
                "the option output_dtype has no effect without dense and ColBERT vectors: leave it "
                "out, or ask for one of them"
            )
        if self.pool_factor is not None:
            self._check_pooling(queries=queries, tokens=tokens)

    def _check_pooling(self, *, queries: bool, tokens: bool) -> None:
        if not self.outputs.colbert:
            raise InvalidRequestError(
                "the option colbert_pool_factor has no effect without ColBERT vectors: leave it "
                "out, or set return_colbert to true"
            )
        if queries or self.muvera == "query":
            raise InvalidRequestError(
                "the option colbert_pool_factor is for documents, and these are queries, which "
                "need all of their vectors: leave it out"
            )
        if tokens:
            raise InvalidRequestError(
                "the options return_tokens and colbert_pool_factor exclude each other, because no "
                "single token stands behind a pooled vector: send one"
            )


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
    """An answer before it is rendered; `texts` are those of the request."""

    texts: list[str]
    result: EmbeddingResult
    names: ModelNames
    options: VectorOptions

    def vectors(self) -> Iterator[TextVectors]:
        """The vectors of each text, post-processed one by one while the answer is rendered."""
        strings = self.result.token_strings or repeat(None, len(self.texts))
        for embedding, tokens in zip(self.result.embeddings, strings, strict=True):
            yield vectors_of(embedding, self.options, tokens)

    def typed_report(self) -> dict[str, Any]:
        """The report with the type of the numbers."""
        return self.report() | {"output_dtype": self.options.dtype}

    def report(self) -> dict[str, Any]:
        """The fields beside vectors: models, usage, times and warnings."""
        return self.names.as_json() | report(self.result)


def vectors_of(
    embedding: TextEmbedding, options: VectorOptions, tokens: TokenStrings | None = None
) -> TextVectors:
    """Post-process the vectors of one text."""
    dense, colbert, outputs = embedding.dense, embedding.colbert, options.outputs
    muvera = None
    if options.muvera is not None and colbert is not None:
        muvera = muvera_of(colbert.shape[1]).encode(colbert, options.muvera)
    if options.pool_factor is not None and colbert is not None:
        colbert = pool(colbert, options.pool_factor)
    wanted = colbert is not None and outputs.colbert
    return TextVectors(
        dense=None if dense is None else quantize(dense, options.dtype),
        sparse=embedding.sparse,
        colbert=quantize(colbert, options.dtype) if wanted else None,  # type: ignore[arg-type]
        muvera=muvera,
        tokens=tokens,
    )


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
