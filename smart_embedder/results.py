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
    """One stage of a request, from `began` to `ended` by `time.perf_counter`.

    `name` is `tokenize`, `queue`, `forward` or `render`, and `model` the model it was for. A
    `forward` lasts from the first batch that held a part of the request to the last; of that the
    device worked for `device_seconds`.
    """

    name: str
    began: float
    ended: float
    model: str | None = None
    device_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds that a request spent in each stage; `queue` is all waiting outside a forward."""

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
    """The vectors of one text; a kind not asked for is None.

    All are float32: `dense` is `[width]`, `colbert` `[tokens - 1, colbert width]`.
    """

    dense: FloatArray | None = None
    sparse: SparseVector | None = None
    colbert: FloatArray | None = None

    @property
    def arrays(self) -> tuple[Any, ...]:
        """All arrays that it holds, or None, in the order in which `in_own_memory` takes them."""
        sparse = self.sparse
        return (self.dense, sparse and sparse.indices, sparse and sparse.values, self.colbert)

    @property
    def nbytes(self) -> int:
        """Their size in bytes."""
        return sum([each.nbytes for each in self.arrays if each is not None])


def in_own_memory(results: Sequence[TextEmbedding]) -> list[TextEmbedding]:
    """The same in memory of their own, and no views of the results of a whole batch.

    It is one block for each kind: many small ones would be new pages for the system each time.
    """
    blocks = map(_in_one_block, zip(*(each.arrays for each in results), strict=True))
    return [
        TextEmbedding(dense, before.sparse and SparseVector(indices, weights), colbert)
        for before, dense, indices, weights, colbert in zip(results, *blocks, strict=True)
    ]


def _in_one_block(arrays: Sequence[Any]) -> list[Any]:
    """Copies that are neighbours in memory; None where there is none."""
    present = [each for each in arrays if each is not None]
    if not present:
        return [None] * len(arrays)
    block, copies, start = np.concatenate(present), list[Any](), 0
    for each in arrays:
        copies.append(None if each is None else block[start : start + len(each)])
        start += 0 if each is None else len(each)
    return copies


@dataclass(frozen=True, slots=True)
class Truncation:
    """A text of the request had `original_tokens`; `model` read only `max_tokens` of them.

    `field` is `sentences`, `query` or `passages`; `index` is the place in a list, 0 for a query.
    The text was cut from `side`. Where not `exact`, `original_tokens` is a lower bound.
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
        """The place in the request, as a JSON pointer."""
        return "/query" if self.field == "query" else f"/{self.field}/{self.index}"

    @property
    def truncated_tokens(self) -> int:
        """How many tokens the model did not read."""
        return self.original_tokens - self.max_tokens


@dataclass(frozen=True, slots=True)
class TokenStrings:
    """The vocabulary's strings for the tokens behind vectors; None for a kind not asked for.

    `sparse[i]` belongs to the weight `values[i]`, `colbert[i]` to row `i`.
    """

    sparse: list[str] | None
    colbert: list[str] | None


@dataclass(frozen=True, slots=True)
class EmbeddingResult:
    """What `EngineCore.embed` returns: one `TextEmbedding` for each text, in the order given.

    `token_strings` has one entry for each text where `return_tokens` is set. `replaced` are JSON
    pointers to the strings of the request whose lone surrogates were read as U+FFFD.
    """

    embeddings: list[TextEmbedding]
    truncations: list[Truncation]
    tokens: int
    timings: Timings
    token_strings: list[TokenStrings] | None = None
    replaced: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PartScores:
    """The scores of one passage for one query; None for a kind that is not made."""

    dense: float | None
    sparse: float | None
    colbert: float | None


@dataclass(frozen=True, slots=True)
class RerankResult:
    """What `EngineCore.rerank` returns: one score for each passage, in the order given.

    `parts` holds the scores behind each one where the embedding model itself was the reranker.
    `replaced` is as in `EmbeddingResult`.
    """

    scores: list[float]
    parts: list[PartScores] | None
    truncations: list[Truncation]
    tokens: int
    timings: Timings
    replaced: tuple[str, ...] = ()


def sigmoid(logits: list[float]) -> list[float]:
    """Probabilities in float32, without overflow for large values of either sign."""
    exact = np.exp(-np.logaddexp(0, -np.asarray(logits, np.float64)))
    probabilities: list[float] = exact.astype(np.float32).tolist()
    return probabilities
