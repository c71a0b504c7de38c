"""The results of requests: vectors, scores, truncations and timings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from smart_embedder.requests import Side

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a request, from `began` to `ended`, both times of `time.perf_counter`.

    `name` is `tokenize`, `queue`, `forward` or `render`, and `model` the model of the stage. A
    `forward` lasts from the first batch with a part of the request to the last; `device_seconds` is
    the duration of its forwards.
    """

    name: str
    began: float
    ended: float
    model: str | None = None
    device_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """The seconds of each stage of a request; `queue` is all time outside the other two."""

    tokenize: float
    queue: float
    inference: float
    total: float
    stages: tuple[Stage, ...] = ()


@dataclass(frozen=True, slots=True)
class SparseVector:
    """Lexical weights: `values[i]` float32 > 0 for the token id `indices[i]`, ids ascending."""

    indices: npt.NDArray[np.int64]
    values: FloatArray


@dataclass(frozen=True, slots=True)
class TextEmbedding:
    """The vectors of a text; a kind that was not asked for is None.

    All are float32: `dense` is `[width]`, `colbert` `[tokens - 1, colbert width]`.
    """

    dense: FloatArray | None = None
    sparse: SparseVector | None = None
    colbert: FloatArray | None = None

    @property
    def arrays(self) -> tuple[Any, ...]:
        """All arrays, or None for missing ones, in the order that `copy_embeddings` expects."""
        sparse = self.sparse
        return (self.dense, sparse and sparse.indices, sparse and sparse.values, self.colbert)

    @property
    def nbytes(self) -> int:
        """The size of all arrays in bytes."""
        return sum([array.nbytes for array in self.arrays if array is not None])


def copy_embeddings(embeddings: Sequence[TextEmbedding]) -> list[TextEmbedding]:
    """Copy embeddings that may be views of the arrays of a whole batch.

    The copies of each kind are in one block of memory, because the system would map new pages for
    many small blocks each time.
    """
    blocks = map(_copy_to_block, zip(*(text.arrays for text in embeddings), strict=True))
    return [
        TextEmbedding(dense, original.sparse and SparseVector(indices, weights), colbert)
        for original, dense, indices, weights, colbert in zip(embeddings, *blocks, strict=True)
    ]


def _copy_to_block(arrays: Sequence[Any]) -> list[Any]:
    """Copy arrays into one block of memory, and return views of it; None stays None."""
    present = [array for array in arrays if array is not None]
    if not present:
        return [None] * len(arrays)
    block, copies, start = np.concatenate(present), list[Any](), 0
    for array in arrays:
        copies.append(None if array is None else block[start : start + len(array)])
        start += 0 if array is None else len(array)
    return copies


@dataclass(frozen=True, slots=True)
class Truncation:
    """A text that was cut: `model` read `max_tokens` of its `original_tokens` tokens.

    `field` is `sentences`, `query` or `passages`, and `index` the position in the list, 0 for a
    query. The text was cut from `side`. Unless `exact`, `original_tokens` is a lower bound.
    """

    field: str
    index: int
    model: str
    max_tokens: int
    original_tokens: int
    side: Side = "right"
    exact: bool = True

    @property
    def pointer(self) -> str:
        """The position in the request as a JSON pointer."""
        return "/query" if self.field == "query" else f"/{self.field}/{self.index}"

    @property
    def truncated_tokens(self) -> int:
        """The number of tokens that the model did not read."""
        return self.original_tokens - self.max_tokens


@dataclass(frozen=True, slots=True)
class TokenStrings:
    """The strings of tokens that have a sparse weight or a ColBERT vector.

    `sparse[i]` belongs to the weight `values[i]`, and `colbert[i]` to row `i`. A kind that was not
    asked for is None.
    """

    sparse: list[str] | None
    colbert: list[str] | None


@dataclass(frozen=True, slots=True)
class EmbeddingResult:
    """The result of `EngineCore.embed`: a `TextEmbedding` for each text, in order.

    With `return_tokens`, `token_strings` has an entry for each text. `replaced` are JSON pointers
    to the strings of the request whose lone surrogates were read as U+FFFD.
    """

    embeddings: list[TextEmbedding]
    truncations: list[Truncation]
    tokens: int
    timings: Timings
    token_strings: list[TokenStrings] | None = None
    replaced: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PartScores:
    """The scores of a passage by kind of vectors; None for a kind that the model lacks."""

    dense: float | None
    sparse: float | None
    colbert: float | None


@dataclass(frozen=True, slots=True)
class RerankResult:
    """The result of `EngineCore.rerank`: a score for each passage, in order.

    `ranking` are the passages' indices, the best first; see `rank`. With late interaction, `parts`
    has the scores by kind of vectors of each passage. `replaced` is as in `EmbeddingResult`.
    """

    scores: list[float]
    ranking: list[int]
    parts: list[PartScores] | None
    truncations: list[Truncation]
    tokens: int
    timings: Timings
    replaced: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a text with a label, and its score from 0 to 1.

    It is the characters (Unicode code points) from `start` up to `end`.
    """

    text: str
    start: int
    end: int
    label: str
    score: float


@dataclass(frozen=True, slots=True)
class ExtractionResult:
    """The result of `EngineCore.extract`: the spans of each text, in their order in it.

    `replaced` is as in `EmbeddingResult`.
    """

    spans: list[list[Span]]
    tokens: int
    timings: Timings
    truncations: tuple[Truncation, ...] = ()
    replaced: tuple[str, ...] = ()


def rank(raw_scores: list[float]) -> list[int]:
    """Return the indices of raw scores, the highest first; equal ones keep their order.

    Every ranking is made here, before a sigmoid or a narrower number format makes scores equal.
    """
    order: list[int] = np.argsort(-np.asarray(raw_scores, np.float64), kind="stable").tolist()
    return order


def sigmoid(logits: list[float]) -> list[float]:
    """Return probabilities in float32, without overflow for large logits of either sign."""
    exact = np.exp(-np.logaddexp(0, -np.asarray(logits, np.float64)))
    probabilities: list[float] = exact.astype(np.float32).tolist()
    return probabilities
