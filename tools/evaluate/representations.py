"""Each kind of vector, in each form in which the service sends it, and how it scores documents.

The documents' vectors are made smaller and restored as a client restores them. Queries stay whole,
except for dense ones, which have the form of the documents.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeVar

import numpy as np
from scipy.sparse import csr_matrix

from smart_embedder.results import FloatArray, SparseVector, TextEmbedding
from smart_embedder.vectors import (
    OUTPUT_DTYPES,
    OutputDtype,
    QuantizedVectors,
    muvera_of,
    pool,
    quantize,
)
from tools.answers import SIGNS, restored

Texts = Sequence[TextEmbedding]
Vectors = TypeVar("Vectors", FloatArray, SparseVector)

DENSE, SPARSE, COLBERT = "dense", "sparse", "colbert"
KINDS = (DENSE, SPARSE, COLBERT)
MUVERA = "muvera"
# Of these kinds, as in the page and the client.
RRF_WEIGHTS = (3.0, 1.0, 3.0)
_POOL_FACTORS = (2, 3, 4)
_FEWER_TYPES: tuple[OutputDtype, ...] = ("float32", "int8")
# More than any vocabulary has.
_TOKEN_IDS = 2**24


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores `[queries, documents]`, and the bytes of the documents' vectors."""

    scores: FloatArray
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Form:
    """Vectors of one kind, in fewer bits, or pooled by `factor`."""

    name: str
    kind: str
    dtype: OutputDtype = "float32"
    factor: int = 1

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of vectors that are needed."""
        return frozenset({self.kind})

    def score(self, queries: Texts, documents: Texts) -> Scored:
        """Dot products; of token vectors the mean of the best for each query vector (MaxSim)."""
        if self.kind == SPARSE:
            weights = _sparse_matrix(documents)
            return Scored((_sparse_matrix(queries) @ weights.T).toarray(), 2 * weights.data.nbytes)
        if self.kind == DENSE:
            made, found = self._dense(documents)
            return Scored(self._dense(queries)[1] @ found.T, _size_of(made))
        tokens = [_given(text.colbert) for text in queries]
        if self.name == MUVERA:
            encoder = muvera_of(tokens[0].shape[1])
            asked = np.stack([encoder.encode(vectors, "query") for vectors in tokens])
            found = np.stack([encoder.encode(_given(d.colbert), "document") for d in documents])
            return Scored(asked @ found.T, found.nbytes)
        lengths = np.array([len(vectors) for vectors in tokens])
        starts, every = np.cumsum(lengths) - lengths, np.concatenate(tokens)
        scores, num_bytes = [], 0
        for text in documents:
            made = quantize(pool(_given(text.colbert), self.factor), self.dtype)
            num_bytes += _size_of(made)
            best = (every @ restore(made, every.shape[1]).T).max(axis=1)
            scores.append(np.add.reduceat(best, starts) / lengths.astype(np.float32))
        return Scored(np.stack(scores, axis=1), num_bytes)

    def _dense(self, texts: Texts) -> tuple[QuantizedVectors, FloatArray]:
        """The vectors as they travel, and restored."""
        vectors = np.stack([_given(text.dense) for text in texts])
        made = quantize(vectors, self.dtype)
        return made, restore(made, vectors.shape[1])


@dataclass(frozen=True, slots=True)
class Fusion:
    """Several kinds together: the mean of their scores, or `by_rank` their places."""

    name: str
    kinds: frozenset[str]
    by_rank: bool


def fuse_ranks(
    rankings: Mapping[str, Sequence[int]], constant: int, weights: Mapping[str, float]
) -> list[int]:
    """Reciprocal rank fusion, the best first; of equal sums the earlier document.

    The ranking by each kind adds weight / (constant + rank) to the documents that it contains; the
    first rank is 1.
    """
    sums = defaultdict[int, float](float)
    for kind, ranking in rankings.items():
        for rank, document in enumerate(ranking, 1):
            sums[document] += weights[kind] / (constant + rank)
    return sorted(sums, key=lambda document: (-sums[document], document))


def all_representations(kinds: frozenset[str]) -> list[Form | Fusion]:
    """Every one of vectors of these kinds, whole kinds first."""
    made = [kind for kind in KINDS if kind in kinds]
    # All kinds under a short name, and each pair of three.
    joined = {"": made} if len(made) > 1 else {}
    if len(made) == len(KINDS):
        joined |= {f" {one}+{other}": [one, other] for one, other in combinations(made, 2)}
    found: list[Form | Fusion] = [Form(kind, kind) for kind in made]
    for name, by_rank in (("fused", False), ("rrf", True)):
        found += [Fusion(name + rest, frozenset(of), by_rank) for rest, of in joined.items()]
    found += [Form(f"dense, {dtype}", DENSE, dtype) for dtype in OUTPUT_DTYPES[1:]]
    found += [Form(f"colbert, {dtype}", COLBERT, dtype) for dtype in OUTPUT_DTYPES[1:]]
    for factor in _POOL_FACTORS:
        name = f"colbert, pooled by {factor}"
        found += [Form(f"{name}, {t}", COLBERT, t, factor=factor) for t in _FEWER_TYPES]
    found.append(Form(MUVERA, COLBERT))
    return [representation for representation in found if representation.kinds <= kinds]


def restore(made: QuantizedVectors, width: int) -> FloatArray:
    """The vectors as a client restores them; of bits, 1 and -1."""
    if made.dtype in {"bfloat16", *SIGNS}:
        return restored(made.values, made.dtype, width)
    numbers = made.values.astype(np.float32) - (128 if made.dtype == "uint8" else 0)
    return numbers if made.scales is None else numbers * made.scales[..., None]


def _size_of(made: QuantizedVectors) -> int:
    return made.values.nbytes + (0 if made.scales is None else made.scales.nbytes)


def _given(vectors: Vectors | None) -> Vectors:
    if vectors is None:
        raise ValueError("a kind of vector is missing that was asked for")
    return vectors


def _sparse_matrix(texts: Texts) -> csr_matrix:
    vectors = [_given(text.sparse) for text in texts]
    ends = np.cumsum([0, *(len(weights.indices) for weights in vectors)])
    indices = np.concatenate([weights.indices for weights in vectors])
    values = np.concatenate([weights.values for weights in vectors])
    return csr_matrix((values, indices, ends), shape=(len(vectors), _TOKEN_IDS))
