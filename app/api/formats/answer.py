"""The answer with vectors before it is rendered: the engine's result and the request's options."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

from app.api.rendering import report
from app.engine.answer_memory import AnswerMemory
from app.engine.types import (
    EmbeddingResult,
    FloatArray,
    Outputs,
    SparseVector,
    TextEmbedding,
    TokenStrings,
)
from app.errors import InvalidRequestError
from app.vectors.muvera import MUVERA_WIDTH, MuveraSide, muvera_of
from app.vectors.pooling import pool, pooling_bytes
from app.vectors.quantization import OutputDtype, QuantizedVectors, quantize

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
