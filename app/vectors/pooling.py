"""Fewer ColBERT vectors of a document: similar ones are replaced by their mean.

Source: PyLate's `pool_embeddings_hierarchical`, with no protected tokens; its means keep their
lengths, and these are scaled.
"""

import numpy as np
import numpy.typing as npt

from app.vectors.ward import cluster

FloatArray = npt.NDArray[np.float32]

# More than any text has tokens.
MAX_POOL_FACTOR = 1_000_000
_LEAST = 1e-12


def pool(vectors: FloatArray, factor: int) -> FloatArray:
    """At most `[tokens // factor, width]` of unit vectors `[tokens, width]`, but at least one.

    Ward's clustering by cosine distance; the means of the clusters have unit length, too, and
    stand in the order of their first tokens. Takes 4 bytes for each pair of tokens while it works.
    """
    tokens = len(vectors)
    clusters = max(tokens // factor, 1)
    if clusters >= tokens:
        return vectors
    firsts = cluster(_cosine_distances(vectors), clusters)
    order = np.argsort(firsts, kind="stable")
    _, starts = np.unique(firsts[order], return_index=True)
    sums = np.add.reduceat(vectors[order], starts, axis=0)
    # The length of a sum does not matter: it is scaled to unit length.
    pooled: FloatArray = sums / np.maximum(np.linalg.norm(sums, axis=-1, keepdims=True), _LEAST)
    return pooled


def pooling_bytes(tokens: int) -> int:
    """What `pool` takes while it works."""
    return np.dtype(np.float32).itemsize * tokens**2


def _cosine_distances(vectors: FloatArray) -> FloatArray:
    distances: FloatArray = vectors @ vectors.T
    # Those below zero, by rounding, are as near to it: they will be squared.
    np.subtract(1, distances, out=distances)
    return distances
