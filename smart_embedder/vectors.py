"""Convert vectors after the forward: quantization, pooling of ColBERT vectors, and MUVERA.

All functions take and return arrays; this module knows neither models nor requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
OutputDtype = Literal["float32", "float16", "bfloat16", "int8", "uint8", "binary", "ubinary"]
MuveraSide = Literal["query", "document"]
OUTPUT_DTYPES: tuple[OutputDtype, ...] = get_args(OutputDtype)
# More than any text has tokens.
MAX_POOL_FACTOR = 1_000_000
_LEAST = 1e-12
_MAX_INT8 = 127
_UINT8_SHIFT = 128
# PyTorch divides more numbers than this among threads, which would take cores from the forward.
_PIECE = 32_768
_HYPERPLANES = 5
_PROJECTED = 16
_REPETITIONS = 20
_SEED = 42
_CELLS = 2**_HYPERPLANES
# Vectors that are multiplied at a time, in float64.
_ROWS = 512
MUVERA_WIDTH = _REPETITIONS * _CELLS * _PROJECTED


@dataclass(frozen=True, slots=True)
class QuantizedVectors:
    """Vectors in the number format `dtype`: `values` `[..., width]`, little-endian.

    - bfloat16 is the upper half of the bits of float32, as uint16.
    - int8 times `scales` `[...]` float32 gives the vector back, within half a step. The largest
      number of a vector is 127 or -127. uint8 is int8 plus 128.
    - ubinary has the signs, eight in a byte, the first in the highest bit: `[..., width / 8]`.
      binary is ubinary minus 128, as int8. Source: sentence-transformers' `quantize_embeddings`.
    """

    dtype: OutputDtype
    values: npt.NDArray[Any]
    scales: FloatArray | None = None

    @property
    def type_name(self) -> str:
        """The type of `values`: its name in numpy, or bfloat16."""
        return "bfloat16" if self.dtype == "bfloat16" else self.values.dtype.name


def quantize(vectors: FloatArray, dtype: OutputDtype) -> QuantizedVectors:
    """Convert vectors `[..., width]` to another number format."""
    values: npt.NDArray[Any]
    scales: FloatArray | None = None
    match dtype:
        case "float32":
            values = vectors
        case "float16" | "bfloat16":
            bits = _rounded(vectors, dtype)
            values = bits.view(np.float16) if dtype == "float16" else bits
        case "int8" | "uint8":
            largest = np.maximum(np.abs(vectors).max(axis=-1, keepdims=True), _LEAST)
            values = np.rint(vectors * (_MAX_INT8 / largest)).astype(np.int8)
            if dtype == "uint8":  # Two's complement: modulo 256.
                values = values.view(np.uint8) + np.uint8(_UINT8_SHIFT)
            scales = np.asarray(largest[..., 0] / _MAX_INT8, np.float32)
        case "binary" | "ubinary":
            values = np.packbits(vectors > 0, axis=-1)
            if dtype == "binary":
                values = (values - np.uint8(_UINT8_SHIFT)).view(np.int8)
    return QuantizedVectors(dtype, values, scales)


def _rounded(vectors: FloatArray, dtype: Literal["float16", "bfloat16"]) -> npt.NDArray[Any]:
    """Return the bits of the nearest numbers, as uint16; 9 times as fast as with numpy."""
    # Not imported with the module, because the port must answer before PyTorch is loaded.
    import torch  # noqa: PLC0415 - see above

    bits = np.empty(vectors.shape, np.uint16)
    numbers = vectors.reshape(-1)
    rounded = torch.from_numpy(bits).view(getattr(torch, dtype)).view(-1)
    for begin in range(0, numbers.size, _PIECE):
        piece = slice(begin, begin + _PIECE)
        rounded[piece] = torch.from_numpy(numbers[piece])
    return bits


def join_scales(vectors: Sequence[QuantizedVectors]) -> FloatArray | None:
    """Concatenate the scales of vectors; None if their number format has none."""
    scales = [np.atleast_1d(part.scales) for part in vectors if part.scales is not None]
    return np.concatenate(scales) if scales else None


def pool(vectors: FloatArray, factor: int) -> FloatArray:
    """Pool unit vectors `[tokens, width]` to at most `[tokens // factor, width]`, at least one.

    Similar vectors are clustered with Ward's method by cosine distance, and each cluster is
    replaced by its mean, scaled to unit length. The means are in the order of their first tokens.
    Uses 4 bytes for each pair of tokens. Source: PyLate's `pool_embeddings_hierarchical` without
    protected tokens; PyLate does not scale the means.
    """
    tokens = len(vectors)
    clusters = max(tokens // factor, 1)
    if clusters >= tokens:
        return vectors
    distances: FloatArray = vectors @ vectors.T
    # Rounding may give values just below zero, which does not matter: they are squared.
    np.subtract(1, distances, out=distances)
    firsts = cluster(distances, clusters)
    order = np.argsort(firsts, kind="stable")
    _, starts = np.unique(firsts[order], return_index=True)
    sums = np.add.reduceat(vectors[order], starts, axis=0)
    # The length of a sum does not matter: it is scaled to unit length.
    pooled: FloatArray = sums / np.maximum(np.linalg.norm(sums, axis=-1, keepdims=True), _LEAST)
    return pooled


def pooling_bytes(tokens: int) -> int:
    """Return the bytes that `pool` uses."""
    return np.dtype(np.float32).itemsize * tokens**2


def cluster(distances: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.intp]:
    """Divide `n` points into `count` clusters; return the first point of each cluster, `[n]`.

    `distances` `[n, n]` must be symmetric, and are overwritten. Source: Murtagh's nearest-neighbour
    chain with the update of Lance and Williams, like `scipy.cluster.hierarchy.linkage`. SciPy holds
    the GIL for 1.6 seconds for a long text of 8,190 tokens; here, other threads run between steps.
    """
    squares = np.square(distances, out=distances)
    np.fill_diagonal(squares, np.inf)
    sizes = np.ones(len(squares))
    # The squared distance of each merge, and a point of each of the two clusters.
    merges: list[tuple[float, int, int]] = []
    chain: list[int] = []
    for _ in range(len(squares) - 1):
        # A point whose cluster was joined to another one has size 0.
        chain = chain or [int(sizes.argmax())]
        # Follow the chain to two clusters that are each other's nearest, and take them off it.
        while True:
            last = chain[-1]
            nearest = int(squares[last].argmin())
            if len(chain) > 1 and squares[last, chain[-2]] <= squares[last, nearest]:
                break
            chain.append(nearest)
        first, second = chain.pop(), chain.pop()
        merges.append((float(squares[first, second]), first, second))
        _join(squares, sizes, first, second)
    parents = np.arange(len(distances))
    for _, left, right in sorted(merges, key=itemgetter(0))[: len(distances) - count]:
        first, second = _root(parents, left), _root(parents, right)
        parents[max(first, second)] = min(first, second)
    return np.array([_root(parents, point) for point in range(len(distances))], np.intp)


def _join(
    squares: npt.NDArray[np.float32], sizes: npt.NDArray[np.float64], first: int, second: int
) -> None:
    """Join the cluster of `first` to that of `second`."""
    a, b, between = sizes[first], sizes[second], squares[first, second]
    joined = ((sizes + a) * squares[first] + (sizes + b) * squares[second] - sizes * between) / (
        sizes + a + b
    )
    joined[[first, second]] = np.inf
    squares[second] = squares[:, second] = joined
    squares[first] = squares[:, first] = np.inf
    sizes[first], sizes[second] = 0, a + b


def _root(parents: npt.NDArray[np.intp], point: int) -> int:
    while parents[point] != point:
        parents[point] = parents[parents[point]]
        point = int(parents[point])
    return point


class Muvera:
    """Encodes the ColBERT vectors of a text as one vector.

    Dot products of encodings approximate MaxSim. Each repetition has random hyperplanes and a
    projection. The encodings equal those of FastEmbed's `Muvera` (the source), so that both can be
    in one collection. The method is the fixed-dimensional encoding of MUVERA (Google, 2024).
    """

    def __init__(self, width: int) -> None:
        random = np.random.default_rng(_SEED)
        planes = [random.normal(size=(width, _HYPERPLANES)) for _ in range(_REPETITIONS)]
        signs = random.choice([-1, 1], size=(_REPETITIONS, width, _PROJECTED))
        # Concatenated, so that all repetitions are one product. Narrow vectors are not projected.
        self._planes = np.concatenate(planes, axis=1)
        self._projections = (
            np.concatenate(list(signs), axis=1) / np.sqrt(_PROJECTED)
            if width > _PROJECTED
            else np.tile(np.eye(width, _PROJECTED), _REPETITIONS)
        )
        cells = np.arange(_CELLS)
        self._distances = np.bitwise_count(cells[:, None] ^ cells)

    def encode(self, vectors: FloatArray, side: MuveraSide) -> FloatArray:
        """Encode ColBERT vectors `[tokens, width]` as `[10240]`; without vectors, all are zeros.

        The cells of a query are sums, and those of a document are means. An empty cell of a
        document gets the first vector of the nearest cell.
        """
        tokens = len(vectors)
        encoding = np.zeros((_REPETITIONS, _CELLS, _PROJECTED))
        # The cell of each vector, and the vector projected for that cell.
        cells = np.empty((tokens, _REPETITIONS), dtype=np.int64)
        projected = np.empty((tokens, _REPETITIONS, _PROJECTED))
        for start in range(0, tokens, _ROWS):
            rows = slice(start, start + _ROWS)
            part = vectors[rows]
            above = (part @ self._planes > 0).reshape(-1, _REPETITIONS, _HYPERPLANES)
            cells[rows] = above @ (1 << np.arange(_HYPERPLANES))
            projected[rows] = (part @ self._projections).reshape(-1, _REPETITIONS, _PROJECTED)
        for repetition in range(_REPETITIONS if tokens else 0):
            cell, added = cells[:, repetition], projected[:, repetition]
            sums = (cell == np.arange(_CELLS)[:, None]) @ added
            if side == "document":
                occupied, first = np.unique(cell, return_index=True)
                counts = np.bincount(cell, minlength=_CELLS)
                empty = counts == 0
                sums /= np.maximum(counts, 1)[:, None]
                nearest = self._distances[empty][:, occupied].argmin(axis=1)
                sums[empty] = added[first[nearest]]
            encoding[repetition] = sums
        return encoding.reshape(-1).astype(np.float32)


@cache
def muvera_of(width: int) -> Muvera:
    """Return the encoder of vectors of this width, which is made once."""
    return Muvera(width)
