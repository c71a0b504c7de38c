"""Divides the sequences of a packed batch into classes, each for one call of an attention kernel.

A kernel for packed sequences starts as many blocks of threads for each sequence as the longest one
needs. The superfluous blocks of a short sequence end at once, but beside one long text those of
thousands of short ones take longer than the attention itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

# Queries in one block of threads, as in FlashAttention's kernels for packed sequences.
QUERIES_OF_A_BLOCK = 128
# The cost of one more call, as a number of superfluous blocks for each head.
WORTH_A_CALL = 256
# The most blocks of threads in the second and third dimension of a grid, one for each sequence.
_MOST_SEQUENCES = 65_535


@dataclass(frozen=True, slots=True)
class LengthClass:
    """Neighbouring sequences, the tokens from `start` to `stop`, the longest of `longest` tokens.

    `bounds` int32 on the device are their cumulative lengths, from 0.
    """

    start: int
    stop: int
    longest: int
    bounds: torch.Tensor


def divide_lengths(lengths: Sequence[int]) -> list[slice]:
    """Divide sequences of ascending lengths so that all calls together cost least."""
    blocks = -(-np.asarray(lengths) // QUERIES_OF_A_BLOCK)
    groups = np.flatnonzero(np.diff(np.ceil(np.log2(blocks)))) + 1
    borders = [0, *groups.tolist(), len(blocks)]
    # For each border the least cost up to it, and the border at which the last class begins.
    best = [(0, 0)]
    for index, stop in enumerate(borders[1:], start=1):
        highest = int(blocks[stop - 1])
        costs = (
            (best[first][0] + WORTH_A_CALL + (stop - borders[first]) * highest, first)
            for first in range(index)
        )
        best.append(min(costs))
    return _classes(borders, best)


def _classes(borders: list[int], best: list[tuple[int, int]]) -> list[slice]:
    classes: list[slice] = []
    index = len(borders) - 1
    while index:
        first = best[index][1]
        classes.append(slice(borders[first], borders[index]))
        index = first
    return [
        slice(start, min(start + _MOST_SEQUENCES, each.stop))
        for each in reversed(classes)
        for start in range(each.start, each.stop, _MOST_SEQUENCES)
    ]
