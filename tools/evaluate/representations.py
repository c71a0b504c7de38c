"""What is compared: each kind of vector, in each form that it may travel in, and what it scores.

A form is what the service answers with: the documents' vectors are made smaller and restored as a
client restores them, and the queries' stay whole, but for dense ones, whose forms are compared with
each other.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import combinations
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix

from smart_embedder.engine.records import FloatArray, SparseVector, TextEmbedding
from smart_embedder.vectors import (
    OUTPUT_DTYPES,
    MuveraSide,
    OutputDtype,
    QuantizedVectors,
    muvera_of,
    pool,
    quantize,
)
from tools.answers import SIGNS, restored

Scores = npt.NDArray[np.float32]
Vectors = TypeVar("Vectors", FloatArray, SparseVector)

Kinds = frozenset[str]

DENSE, SPARSE, COLBERT = "dense", "sparse", "colbert"
KINDS = (DENSE, SPARSE, COLBERT)
# What the kinds count in the sum of their scores where nothing else is said.
EQUAL: Mapping[str, float] = dict.fromkeys(KINDS, 1.0)
# As in the page and the client.
RRF_WEIGHTS: Mapping[str, float] = {DENSE: 3.0, SPARSE: 1.0, COLBERT: 3.0}
_POOL_FACTORS = (2, 3, 4)
# More than any vocabulary has.
_TOKEN_IDS = 2**24
_LEAST = 1e-12


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores `[queries, documents]`, and the bytes of the documents' vectors."""

    scores: Scores
    num_bytes: int


def restore(made: QuantizedVectors, width: int) -> FloatArray:
    """The vectors as a client restores them; of bits, 1 and -1."""
    if made.dtype in {"bfloat16", *SIGNS}:
        return restored(made.values, made.dtype, width)
    numbers = made.values.astype(np.float32) - (128 if made.dtype == "uint8" else 0)
    return numbers if made.scales is None else numbers * made.scales[..., None]


def _size_of(made: QuantizedVectors) -> int:
    return made.values.nbytes + (0 if made.scales is None else made.scales.nbytes)


class Queries:
    """The vectors of all queries, in the forms that documents are compared with."""

    def __init__(self, embeddings: Sequence[TextEmbedding]) -> None:
        self._embeddings = embeddings
        self.dense = cache(self._make_dense)

    def _make_dense(self, dtype: OutputDtype, dimensions: int | None) -> FloatArray:
        """`[queries, width]`."""
        vectors = _dense(self._embeddings, dimensions)
        return restore(quantize(vectors, dtype), vectors.shape[1])

    @cached_property
    def sparse(self) -> csr_matrix:
        """`[queries, token ids]`."""
        return _sparse_matrix(self._embeddings)

    @cached_property
    def colbert(self) -> FloatArray:
        """`[tokens of all queries, width]`."""
        return np.concatenate([_colbert(each) for each in self._embeddings])

    @cached_property
    def colbert_starts(self) -> npt.NDArray[np.int64]:
        """The first row of each query in `colbert`."""
        lengths = [len(_colbert(each)) for each in self._embeddings]
        return np.cumsum([0, *lengths[:-1]])

    @cached_property
    def muvera(self) -> FloatArray:
        """`[queries, 10240]`."""
        return _muvera(self._embeddings, "query")


class Piece:
    """The vectors of some documents, and their scores for all queries, computed once each."""

    def __init__(self, queries: Queries, embeddings: Sequence[TextEmbedding]) -> None:
        self._queries = queries
        self._embeddings = embeddings
        self.dense = cache(self._score_dense)
        self.colbert = cache(self._score_colbert)
        self._pooled = cache(lambda factor: [pool(_colbert(each), factor) for each in embeddings])

    def _score_dense(self, dtype: OutputDtype = "float32", dimensions: int | None = None) -> Scored:
        """Dot products."""
        vectors = _dense(self._embeddings, dimensions)
        made = quantize(vectors, dtype)
        documents = restore(made, vectors.shape[1])
        return Scored(self._queries.dense(dtype, dimensions) @ documents.T, _size_of(made))

    @cached_property
    def sparse(self) -> Scored:
        """Sums of products over shared tokens."""
        documents = _sparse_matrix(self._embeddings)
        scores = (self._queries.sparse @ documents.T).toarray()
        return Scored(scores, 2 * documents.data.nbytes)

    def _score_colbert(self, dtype: OutputDtype = "float32", factor: int = 1) -> Scored:
        """Means of the best document vector for each query vector (MaxSim)."""
        queries, starts = self._queries.colbert, self._queries.colbert_starts
        lengths = np.diff([*starts, len(queries)]).astype(np.float32)
        scores, num_bytes = [], 0
        for vectors in self._pooled(factor):
            made = quantize(vectors, dtype)
            num_bytes += _size_of(made)
            best = (queries @ restore(made, vectors.shape[1]).T).max(axis=1)
            scores.append(np.asarray(np.add.reduceat(best, starts) / lengths, np.float32))
        return Scored(np.stack(scores, axis=1), num_bytes)

    @cached_property
    def muvera(self) -> Scored:
        """Dot products of the fixed-dimensional encodings."""
        documents = _muvera(self._embeddings, "document")
        return Scored(self._queries.muvera @ documents.T, documents.nbytes)

    def by_kind(self, kind: str) -> Scored:
        """The scores of a whole kind of vectors."""
        if kind == SPARSE:
            return self.sparse
        return self.dense() if kind == DENSE else self.colbert()

    def fused(self, weights: Mapping[str, float]) -> Scored:
        """The weighted mean of scores; of equal weights it is that of late interaction."""
        parts = {kind: self.by_kind(kind) for kind in weights}
        total = sum(np.float32(weights[kind]) * part.scores for kind, part in parts.items())
        mean = np.asarray(total / np.float32(sum(weights.values())), np.float32)
        return Scored(mean, sum(part.num_bytes for part in parts.values()))


@dataclass(frozen=True, slots=True)
class Representation:
    """A name, the kinds of vectors that it needs, and how a piece is scored.

    Without `score` the rankings by each of `kinds` are fused by `fuse_ranks`. With `order_by` the
    best documents are found by `score` and then ordered by that. `basic` ones are what a reference
    implementation has, too.
    """

    name: str
    kinds: Kinds
    score: Callable[[Piece], Scored] | None = None
    order_by: Callable[[Piece], Scored] | None = None
    basic: bool = False


def fuse_ranks(
    rankings: Mapping[str, Sequence[int]], constant: int, weights: Mapping[str, float]
) -> list[int]:
    """Reciprocal rank fusion, the best first; of equal sums the earlier document.

    The ranking by each kind adds weight / (constant + rank) to what it contains; the first rank is
    1.
    """
    sums = defaultdict[int, float](float)
    for kind, ranking in rankings.items():
        for rank, document in enumerate(ranking, 1):
            sums[document] += weights[kind] / (constant + rank)
    return sorted(sums, key=lambda document: (-sums[document], document))


def whole(kind: str) -> Representation:
    """A kind of vector as the model makes it."""
    return Representation(kind, frozenset({kind}), lambda piece: piece.by_kind(kind), basic=True)


def all_representations(
    kinds: Kinds, dimensions: Sequence[int] = (), weights: Mapping[str, float] = EQUAL
) -> list[Representation]:
    """Every one of vectors of these kinds, the basic ones first.

    `dimensions` are those that the dense vectors may be shortened to, `weights` those of the kinds
    in the sum of their scores.
    """
    dense, colbert = frozenset({DENSE}), frozenset({COLBERT})
    fewer_types: tuple[OutputDtype, ...] = ("float32", "int8")

    def as_dense(dtype: OutputDtype, width: int | None = None) -> Representation:
        shorter = "" if width is None else f" {width} dimensions,"
        name = f"dense,{shorter} {dtype}"
        return Representation(name, dense, lambda piece: piece.dense(dtype, width))

    def as_colbert(dtype: OutputDtype, factor: int = 1) -> Representation:
        pooled = "" if factor == 1 else f" pooled by {factor},"
        name = f"colbert,{pooled} {dtype}"
        return Representation(name, colbert, lambda piece: piece.colbert(dtype, factor))

    def fused(of: Sequence[str], name: str) -> Representation:
        counted = {kind: weights[kind] for kind in of}
        return Representation(name, frozenset(of), lambda piece: piece.fused(counted), basic=True)

    made = [kind for kind in KINDS if kind in kinds]
    each = [whole(kind) for kind in made]
    # Of all that there are under a short name, and of each pair of three.
    joined = [(made, "")] if len(made) > 1 else []
    pairs = list(map(list, combinations(made, 2)))
    joined += [(pair, f" {'+'.join(pair)}") for pair in pairs if pair != made]
    each += [fused(of, f"fused{rest}") for of, rest in joined]
    each += [Representation(f"rrf{rest}", frozenset(of)) for of, rest in joined]
    each += [as_dense(dtype) for dtype in OUTPUT_DTYPES[1:]]
    each += [as_dense(dtype, width) for width in dimensions for dtype in fewer_types]
    each += [as_colbert(dtype) for dtype in OUTPUT_DTYPES[1:]]
    each += [as_colbert(dtype, factor) for factor in _POOL_FACTORS for dtype in fewer_types]
    by_muvera, by_colbert = (lambda piece: piece.muvera), (lambda piece: piece.colbert())
    each.append(Representation("muvera", colbert, by_muvera))
    each.append(Representation("muvera, best by colbert", colbert, by_muvera, by_colbert))
    return [representation for representation in each if representation.kinds <= kinds]


def _dense(embeddings: Sequence[TextEmbedding], dimensions: int | None) -> FloatArray:
    """`[texts, width]`, of unit length with fewer dimensions, too."""
    vectors = np.stack([_given(each.dense) for each in embeddings])
    if dimensions is None:
        return vectors
    shorter = vectors[:, :dimensions]
    lengths = np.linalg.norm(shorter, axis=1, keepdims=True)
    return np.asarray(shorter / np.maximum(lengths, _LEAST), np.float32)


def _colbert(embedding: TextEmbedding) -> FloatArray:
    return _given(embedding.colbert)


def _given(vectors: Vectors | None) -> Vectors:
    if vectors is None:
        raise ValueError("a kind of vector is missing that was asked for")
    return vectors


def _muvera(embeddings: Sequence[TextEmbedding], side: MuveraSide) -> FloatArray:
    vectors = [_colbert(each) for each in embeddings]
    return np.stack([muvera_of(each.shape[1]).encode(each, side) for each in vectors])


def _sparse_matrix(embeddings: Sequence[TextEmbedding]) -> csr_matrix:
    vectors = [_given(each.sparse) for each in embeddings]
    ends = np.cumsum([0, *(len(each.indices) for each in vectors)])
    indices = np.concatenate([each.indices for each in vectors])
    values = np.concatenate([each.values for each in vectors])
    return csr_matrix((values, indices, ends), shape=(len(vectors), _TOKEN_IDS))
