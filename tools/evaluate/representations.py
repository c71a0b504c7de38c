"""Score documents by each kind of vector, in each form of the service.

Vectors of documents are quantized, then restored as by a client. Queries stay in float32, except
dense ones, which have the form of the documents.
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
from tools.answers import SIGNS, restore_numbers

Texts = Sequence[TextEmbedding]
Vectors = TypeVar("Vectors", FloatArray, SparseVector)

DENSE, SPARSE, COLBERT = "dense", "sparse", "colbert"
KINDS = (DENSE, SPARSE, COLBERT)
MUVERA = "muvera"
# Weights of `KINDS`, as in the page and the client.
RRF_WEIGHTS = (3.0, 1.0, 3.0)
_POOL_FACTORS = (2, 3, 4)
_POOLED_DTYPES: tuple[OutputDtype, ...] = ("float32", "int8")
# More than the tokens of any vocabulary.
_TOKEN_IDS = 2**24


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores `[queries, documents]`, and the size of the documents' vectors."""

    scores: FloatArray
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Form:
    """Vectors of one kind as `dtype`, pooled by `factor`."""

    name: str
    kind: str
    dtype: OutputDtype = "float32"
    factor: int = 1

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of vectors that the form needs."""
        return frozenset({self.kind})

    def score(self, queries: Texts, documents: Texts) -> Scored:
        """Compute dot products; for ColBERT the mean over query vectors of the maximum (MaxSim)."""
        if self.kind == SPARSE:
            weights = _sparse_matrix(documents)
            return Scored((_sparse_matrix(queries) @ weights.T).toarray(), 2 * weights.data.nbytes)
        if self.kind == DENSE:
            quantized, restored = self._restore_dense(documents)
            return Scored(self._restore_dense(queries)[1] @ restored.T, _count_bytes(quantized))
        tokens = [_require(text.colbert) for text in queries]
        if self.name == MUVERA:
            encoder = muvera_of(tokens[0].shape[1])
            encoded_queries = np.stack([encoder.encode(vectors, "query") for vectors in tokens])
            encoded = np.stack([encoder.encode(_require(d.colbert), "document") for d in documents])
            return Scored(encoded_queries @ encoded.T, encoded.nbytes)
        lengths = np.array([len(vectors) for vectors in tokens])
        starts, all_tokens = np.cumsum(lengths) - lengths, np.concatenate(tokens)
        scores, num_bytes = [], 0
        for text in documents:
            quantized = quantize(pool(_require(text.colbert), self.factor), self.dtype)
            num_bytes += _count_bytes(quantized)
            best = (all_tokens @ restore(quantized, all_tokens.shape[1]).T).max(axis=1)
            scores.append(np.add.reduceat(best, starts) / lengths.astype(np.float32))
        return Scored(np.stack(scores, axis=1), num_bytes)

    def _restore_dense(self, texts: Texts) -> tuple[QuantizedVectors, FloatArray]:
        """Quantize the dense vectors; return them quantized and restored."""
        vectors = np.stack([_require(text.dense) for text in texts])
        quantized = quantize(vectors, self.dtype)
        return quantized, restore(quantized, vectors.shape[1])


@dataclass(frozen=True, slots=True)
class Fusion:
    """Several kinds together: the mean of their scores, or `by_rank` reciprocal rank fusion."""

    name: str
    kinds: frozenset[str]
    by_rank: bool


def fuse_ranks(
    rankings: Mapping[str, Sequence[int]], constant: int, weights: Mapping[str, float]
) -> list[int]:
    """Fuse rankings by reciprocal rank, the best first; with equal sums the earlier document.

    Each ranking adds weight / (constant + rank) to its documents; the first rank is 1.
    """
    sums = defaultdict[int, float](float)
    for kind, ranking in rankings.items():
        for rank, document in enumerate(ranking, 1):
            sums[document] += weights[kind] / (constant + rank)
    return sorted(sums, key=lambda document: (-sums[document], document))


def all_representations(kinds: frozenset[str]) -> list[Form | Fusion]:
    """List all representations of vectors of these kinds, whole kinds first."""
    available = [kind for kind in KINDS if kind in kinds]
    # All kinds under a short name, and each pair of three.
    fused = {"": available} if len(available) > 1 else {}
    if len(available) == len(KINDS):
        fused |= {f" {one}+{other}": [one, other] for one, other in combinations(available, 2)}
    found: list[Form | Fusion] = [Form(kind, kind) for kind in available]
    for name, by_rank in (("fused", False), ("rrf", True)):
        found += [Fusion(name + suffix, frozenset(of), by_rank) for suffix, of in fused.items()]
    found += [Form(f"dense, {dtype}", DENSE, dtype) for dtype in OUTPUT_DTYPES[1:]]
    found += [Form(f"colbert, {dtype}", COLBERT, dtype) for dtype in OUTPUT_DTYPES[1:]]
    for factor in _POOL_FACTORS:
        name = f"colbert, pooled by {factor}"
        found += [Form(f"{name}, {t}", COLBERT, t, factor=factor) for t in _POOLED_DTYPES]
    found.append(Form(MUVERA, COLBERT))
    return [representation for representation in found if representation.kinds <= kinds]


def restore(quantized: QuantizedVectors, width: int) -> FloatArray:
    """Restore vectors as a client does; packed signs become 1 and -1."""
    values, scales = quantized.values, quantized.scales
    if quantized.dtype in {"bfloat16", *SIGNS}:
        return restore_numbers(values, quantized.dtype, width)
    numbers = values.astype(np.float32) - (128 if quantized.dtype == "uint8" else 0)
    return numbers if scales is None else numbers * scales[..., None]


def _count_bytes(quantized: QuantizedVectors) -> int:
    return quantized.values.nbytes + (0 if quantized.scales is None else quantized.scales.nbytes)


def _require(vectors: Vectors | None) -> Vectors:
    if vectors is None:
        raise ValueError("the response lacks a kind of vector that was requested")
    return vectors


def _sparse_matrix(texts: Texts) -> csr_matrix:
    vectors = [_require(text.sparse) for text in texts]
    ends = np.cumsum([0, *(len(weights.indices) for weights in vectors)])
    indices = np.concatenate([weights.indices for weights in vectors])
    values = np.concatenate([weights.values for weights in vectors])
    return csr_matrix((values, indices, ends), shape=(len(vectors), _TOKEN_IDS))
