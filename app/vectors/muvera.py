"""One vector for the ColBERT vectors of a text, whose dot products are about their MaxSim.

Source: FastEmbed's `Muvera`, whose encodings these equal, so that a collection can hold both; the
method is MUVERA's fixed-dimensional encoding (Google, 2024).
"""

from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
MuveraSide = Literal["query", "document"]

_HYPERPLANES = 5
_PROJECTED = 16
_REPETITIONS = 20
_SEED = 42
_CELLS = 2**_HYPERPLANES
# Multiplied at a time, as float64.
_ROWS = 512
MUVERA_WIDTH = _REPETITIONS * _CELLS * _PROJECTED


class Muvera:
    """Encodes vectors of one width; each repetition has random hyperplanes and a projection."""

    def __init__(self, width: int) -> None:
        random = np.random.default_rng(_SEED)
        planes = [random.normal(size=(width, _HYPERPLANES)) for _ in range(_REPETITIONS)]
        signs = random.choice([-1, 1], size=(_REPETITIONS, width, _PROJECTED))
        # Side by side, so that all repetitions are one product. Narrow vectors are not projected.
        self._planes = np.concatenate(planes, axis=1)
        self._projections = (
            np.concatenate(list(signs), axis=1) / np.sqrt(_PROJECTED)
            if width > _PROJECTED
            else np.tile(np.eye(width, _PROJECTED), _REPETITIONS)
        )
        cells = np.arange(_CELLS)
        self._distances = np.bitwise_count(cells[:, None] ^ cells)

    def encode(self, vectors: FloatArray, side: MuveraSide) -> FloatArray:
        """`[10240]` of ColBERT vectors `[tokens, width]`; all zeros where there are none.

        A query's cells hold sums, a document's means, and those of a document that no vector falls
        into hold the first vector of the nearest cell.
        """
        tokens = len(vectors)
        encoding = np.zeros((_REPETITIONS, _CELLS, _PROJECTED))
        if tokens:
            cells = np.empty((tokens, _REPETITIONS), dtype=np.int64)
            projected = np.empty((tokens, _REPETITIONS, _PROJECTED))
            for start in range(0, tokens, _ROWS):
                rows = slice(start, start + _ROWS)
                cells[rows], projected[rows] = self._project(vectors[rows])
            for repetition in range(_REPETITIONS):
                own = projected[:, repetition]
                encoding[repetition] = self._encode_once(cells[:, repetition], own, side)
        return encoding.reshape(-1).astype(np.float32)

    def _project(
        self, vectors: FloatArray
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """The cell of each vector, `[tokens, repetitions]`, and what it adds to that cell."""
        sides = (-1, _REPETITIONS, _HYPERPLANES)
        above = (vectors @ self._planes > 0).reshape(sides)
        projected = (vectors @ self._projections).reshape(-1, _REPETITIONS, _PROJECTED)
        return above @ (1 << np.arange(_HYPERPLANES)), projected

    def _encode_once(
        self,
        cells: npt.NDArray[np.int64],
        projected: npt.NDArray[np.float64],
        side: MuveraSide,
    ) -> npt.NDArray[np.float64]:
        """`[cells, projected]`."""
        sums: npt.NDArray[np.float64] = (cells == np.arange(_CELLS)[:, None]) @ projected
        if side == "query":
            return sums
        occupied, first = np.unique(cells, return_index=True)
        counts = np.bincount(cells, minlength=_CELLS)
        empty = counts == 0
        means: npt.NDArray[np.float64] = sums / np.maximum(counts, 1)[:, None]
        nearest = self._distances[empty][:, occupied].argmin(axis=1)
        means[empty] = projected[first[nearest]]
        return means


@cache
def muvera_of(width: int) -> Muvera:
    """The encoder of vectors of this width, made once."""
    return Muvera(width)
