"""Canaries: short texts whose vectors are kept, and compared with those of another server.

The same space makes the same vectors, but for the rounding of its number format. Where it does not,
an update, a kernel, a driver or a damaged file has changed what a model computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from smart_embedder.results import FloatArray, SparseVector, TextEmbedding
from smart_embedder.tokens import TokenIds

# In many scripts, with numbers, code and marks. They never change: a file with vectors of other
# texts is not compared.
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
# The largest distance that the rounding of all layers explains, by the format that is coarser: ten
# times as much as was seen.
TOLERANCES = {"float32": 1e-5, "float16": 1e-4, "bfloat16": 2e-3, "int8": 2e-2, "float8": 2e-2}
# The squared length of a sparse vector below which its weights decide nothing.
_LIGHT = 1e-2


@dataclass(frozen=True, slots=True)
class KindCanaries:
    """What one model made of the canaries: `rows` are one vector of each, of one kind.

    Sparse vectors are rows of their own `columns`, the tokens that have a weight in any of them. Of
    ColBERT vectors the row is their mean.
    """

    rows: FloatArray
    columns: TokenIds | None = None

    @classmethod
    def of_sparse(cls, vectors: Sequence[SparseVector]) -> "KindCanaries":
        """Of the sparse vector of each canary."""
        columns = np.unique(np.concatenate([each.indices for each in vectors]))
        rows = [_spread(each.values, each.indices, columns) for each in vectors]
        return cls(np.stack(rows), columns)

    def distances(self, other: "KindCanaries") -> FloatArray:
        """How much each row differs from the other's: |a - b|^2 / (|a|^2 + |b|^2).

        Of vectors of one length it is 1 minus their cosine; at most it is 2, and so it is where the
        rows have other numbers of dimensions.
        """
        first, second, least = self.rows, other.rows, 1e-12
        if self.columns is not None and other.columns is not None:
            columns, least = np.union1d(self.columns, other.columns), _LIGHT
            first = _spread(first, self.columns, columns)
            second = _spread(second, other.columns, columns)
        if first.shape != second.shape:
            return np.full(len(first), 2, np.float32)
        lengths = (first**2).sum(axis=1) + (second**2).sum(axis=1)
        distances: FloatArray = ((first - second) ** 2).sum(axis=1) / np.maximum(lengths, least)
        return distances


def _spread(numbers: FloatArray, columns: TokenIds, among: TokenIds) -> FloatArray:
    """`numbers` `[..., columns]` at their places among more columns; zero at all others."""
    spread = np.zeros((*numbers.shape[:-1], len(among)), np.float32)
    spread[..., np.searchsorted(among, columns)] = numbers
    return spread


def canaries_of(embeddings: Sequence[TextEmbedding]) -> dict[str, KindCanaries]:
    """Each kind of the vectors that a model made of the canaries."""
    found = {}
    first = embeddings[0]
    if first.dense is not None:
        found["dense"] = KindCanaries(
            np.stack([e.dense for e in embeddings if e.dense is not None])
        )
    if first.sparse is not None:
        sparse = [each.sparse for each in embeddings if each.sparse is not None]
        found["sparse"] = KindCanaries.of_sparse(sparse)
    if first.colbert is not None:
        means = [each.colbert.mean(axis=0) for each in embeddings if each.colbert is not None]
        found["colbert"] = KindCanaries(np.stack(means))
    return found


def tolerance_of(*dtypes: str | None) -> float:
    """The distance that the coarsest format explains; None, not known, counts as bfloat16."""
    unknown = TOLERANCES["bfloat16"]
    return max(TOLERANCES.get(dtype or "", unknown) for dtype in dtypes)
