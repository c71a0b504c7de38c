"""Reranking by an embedding model: a score from each kind of vectors, and their weighted mean.

Source: FlagEmbedding's `BGEM3FlagModel.compute_score`. Knows nothing of models or devices.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from app.engine.types import FloatArray, Outputs, PartScores, SparseVector, TextEmbedding
from app.errors import InvalidRequestError

# 4 MiB of them.
_MOST_PRODUCTS = 1 << 20

Vectors = TypeVar("Vectors", FloatArray, SparseVector)


@dataclass(frozen=True, slots=True)
class FusionWeights:
    """How much each score counts; equal by default, as in FlagEmbedding."""

    dense: float = 1.0
    sparse: float = 1.0
    colbert: float = 1.0

    def __post_init__(self) -> None:
        parts = (self.dense, self.sparse, self.colbert)
        if not all(np.isfinite(parts)) or min(parts) < 0 or not any(parts):
            raise InvalidRequestError("weights must be at least 0, and one of them above 0")

    def require_one_of(self, kinds: Outputs) -> None:
        """Raise `InvalidRequestError` unless a kind in `kinds` has a weight above 0."""
        available = (kinds.dense, kinds.sparse, kinds.colbert)
        if not any(weight and kind for weight, kind in zip(self._all, available, strict=True)):
            raise InvalidRequestError(
                "one of the weights must be above 0 of the kinds of vectors that the model makes"
            )

    @property
    def _all(self) -> tuple[float, float, float]:
        return self.dense, self.sparse, self.colbert

    def fuse(self, scores: PartScores) -> float:
        """The weighted mean of the scores that are not None."""
        parts = (scores.dense, scores.sparse, scores.colbert)
        counted = [
            (weight, part)
            for weight, part in zip(self._all, parts, strict=True)
            if part is not None
        ]
        return sum(weight * part for weight, part in counted) / sum(weight for weight, _ in counted)


def score(query: TextEmbedding, passage: TextEmbedding) -> PartScores:
    """The scores of one passage by the kinds of vectors that both have."""
    return PartScores(
        dense=_of_both(_dense_score, query.dense, passage.dense),
        sparse=_of_both(_lexical_score, query.sparse, passage.sparse),
        colbert=_of_both(_colbert_score, query.colbert, passage.colbert),
    )


def _of_both(
    score: Callable[[Vectors, Vectors], float], query: Vectors | None, passage: Vectors | None
) -> float | None:
    return None if query is None or passage is None else score(query, passage)


def _dense_score(query: FloatArray, passage: FloatArray) -> float:
    return float(query @ passage)


def _lexical_score(query: SparseVector, passage: SparseVector) -> float:
    _, left, right = np.intersect1d(
        query.indices, passage.indices, assume_unique=True, return_indices=True
    )
    return float(query.values[left] @ passage.values[right])


def _colbert_score(query: FloatArray, passage: FloatArray) -> float:
    """The mean, over the query vectors, of the best product with a passage vector.

    Of long texts the products are made for some query vectors at a time: those of two texts of
    8,192 tokens would take 256 MiB.
    """
    rows = max(1, _MOST_PRODUCTS // max(1, len(passage)))
    blocks = (query[start : start + rows] for start in range(0, len(query), rows))
    best = np.concatenate([(block @ passage.T).max(axis=1) for block in blocks])
    return float(best.mean())
