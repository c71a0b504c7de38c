"""bge-m3 as its own reranker: three scores of a passage for a query, and their weighted mean.

Source: FlagEmbedding's `BGEM3FlagModel.compute_score`. Knows nothing of models or devices.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from app.engine.types import FloatArray, PartScores, SparseVector, TextEmbedding
from app.errors import InvalidRequestError

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

    def fuse(self, scores: PartScores) -> float:
        """The weighted mean of the three."""
        total = (
            self.dense * scores.dense + self.sparse * scores.sparse + self.colbert * scores.colbert
        )
        return total / (self.dense + self.sparse + self.colbert)


def score(query: TextEmbedding, passage: TextEmbedding) -> PartScores:
    """The three scores of one passage; both must hold all three kinds of vectors."""
    return PartScores(
        dense=float(_required(query.dense) @ _required(passage.dense)),
        sparse=_lexical_score(_required(query.sparse), _required(passage.sparse)),
        colbert=_colbert_score(_required(query.colbert), _required(passage.colbert)),
    )


def _lexical_score(query: SparseVector, passage: SparseVector) -> float:
    _, left, right = np.intersect1d(
        query.indices, passage.indices, assume_unique=True, return_indices=True
    )
    return float(query.values[left] @ passage.values[right])


def _colbert_score(query: FloatArray, passage: FloatArray) -> float:
    """The best passage vector for each query vector, averaged."""
    return float((query @ passage.T).max(axis=1).mean())


def _required(vectors: Vectors | None) -> Vectors:
    if vectors is None:
        raise ValueError("late interaction needs all three kinds of vectors")
    return vectors
