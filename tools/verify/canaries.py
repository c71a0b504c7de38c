"""Canaries: short texts whose vectors by one server are compared with those by another.

In one vector space they are equal except for rounding. Otherwise an update, a kernel, a driver or a
damaged file has changed the results of a model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from smart_embedder.results import FloatArray, SparseVector, TextEmbedding
from smart_embedder.tokens import TokenIds

# In many scripts, with numbers and punctuation. They must not change: files with vectors of other
# texts cannot be compared.
CANARIES = (
    "Hybrid search joins meaning and exact words.",
    "Öltank schließt bei 7,5 bar",
    "скорость света",
    "قواعد البيانات",
    "खोज इंजन",
    "การค้นหาเอกสาร",
    "向量数据库",
    "検索の仕組み",
    "ERR_4711: AX-200/B is NOT in stock!",
)
# The largest distance that rounding explains, by the coarser number format: ten times the largest
# that was measured.
TOLERANCES = {"float32": 1e-5, "float16": 1e-4, "bfloat16": 2e-3, "int8": 2e-2, "float8": 2e-2}
# A sparse vector with a squared length below this has no weight that matters.
_MIN_SPARSE_LENGTH = 1e-2


@dataclass(frozen=True, slots=True)
class KindCanaries:
    """The vectors of one kind, with one row for each canary.

    For sparse vectors, `columns` are the tokens that have a weight in any row. For ColBERT vectors,
    a row is the mean of the text's vectors.
    """

    rows: FloatArray
    columns: TokenIds | None = None

    @classmethod
    def of_sparse(cls, vectors: Sequence[SparseVector]) -> "KindCanaries":
        """Create the rows of the sparse vectors."""
        columns = np.unique(np.concatenate([vector.indices for vector in vectors]))
        rows = [_spread(vector.values, vector.indices, columns) for vector in vectors]
        return cls(np.stack(rows), columns)

    def distances(self, other: "KindCanaries") -> FloatArray:
        """Return the distance between each pair of rows: |a - b|^2 / (|a|^2 + |b|^2).

        For vectors of equal length it is 1 minus their cosine. The maximum, 2, is also returned if
        the numbers of dimensions differ.
        """
        first, second, least = self.rows, other.rows, 1e-12
        if self.columns is not None and other.columns is not None:
            columns, least = np.union1d(self.columns, other.columns), _MIN_SPARSE_LENGTH
            first = _spread(first, self.columns, columns)
            second = _spread(second, other.columns, columns)
        if first.shape != second.shape:
            return np.full(len(first), 2, np.float32)
        lengths = (first**2).sum(axis=1) + (second**2).sum(axis=1)
        distances: FloatArray = ((first - second) ** 2).sum(axis=1) / np.maximum(lengths, least)
        return distances


def _spread(numbers: FloatArray, columns: TokenIds, among: TokenIds) -> FloatArray:
    """Copy `numbers` `[..., columns]` to their columns in `among`; the others are zero."""
    spread = np.zeros((*numbers.shape[:-1], len(among)), np.float32)
    spread[..., np.searchsorted(among, columns)] = numbers
    return spread


def group_by_kind(embeddings: Sequence[TextEmbedding]) -> dict[str, KindCanaries]:
    """Group the vectors of the canaries by kind."""
    found = {}
    first = embeddings[0]
    if first.dense is not None:
        dense = [item.dense for item in embeddings if item.dense is not None]
        found["dense"] = KindCanaries(np.stack(dense))
    if first.sparse is not None:
        sparse = [item.sparse for item in embeddings if item.sparse is not None]
        found["sparse"] = KindCanaries.of_sparse(sparse)
    if first.colbert is not None:
        means = [item.colbert.mean(axis=0) for item in embeddings if item.colbert is not None]
        found["colbert"] = KindCanaries(np.stack(means))
    return found


def choose_tolerance(*dtypes: str | None) -> float:
    """Return the tolerance of the coarsest format; None, an unknown one, counts as bfloat16."""
    unknown = TOLERANCES["bfloat16"]
    return max(TOLERANCES.get(dtype or "", unknown) for dtype in dtypes)
