"""Prefixes that texts of a batch have in common, which a causal model computes once.

There a token's state depends on the tokens up to it alone. Pairs of one query share their template,
instruction and query, and so do texts behind one instruction.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from app.engine.types import TokenIds

Places = npt.NDArray[np.int64]
# Gathering what was shared has a cost in every layer.
_LEAST_SAVED = 1 / 16


@dataclass(frozen=True, slots=True)
class Sharing:
    """`unique` `[U]`: the tokens that are computed; `inverse` `[T]`: which of them each one is."""

    unique: Tensor
    inverse: Tensor


def shared_places(sequences: Sequence[TokenIds]) -> tuple[Places, Places] | None:
    """`unique` and `inverse` of the sequences joined end to end; None where little is shared."""
    offsets = np.cumsum([0, *map(len, sequences)])
    unique = np.empty(offsets[-1], np.int64)
    inverse = np.empty(offsets[-1], np.int64)
    count = 0
    for index, previous, shared in _neighbours(sequences):
        start, stop = offsets[index] + shared, offsets[index + 1]
        inverse[offsets[index] : start] = inverse[offsets[previous] : offsets[previous] + shared]
        inverse[start:stop] = np.arange(count, count + stop - start)
        unique[count : count + stop - start] = np.arange(start, stop)
        count += stop - start
    return None if count > (1 - _LEAST_SAVED) * len(inverse) else (unique[:count], inverse)


def _neighbours(sequences: Sequence[TokenIds]) -> Iterator[tuple[int, int, int]]:
    """Each sequence with the one before it in dictionary order, and how far they are the same.

    No other that came before begins with more of it.
    """
    order = sorted(range(len(sequences)), key=lambda index: _sortable(sequences[index]))
    for previous, index in zip([order[0], *order], order, strict=False):
        shared = 0 if index == order[0] else _common(sequences[previous], sequences[index])
        yield index, previous, shared


def _sortable(ids: TokenIds) -> bytes:
    return ids.astype(">i8").tobytes()


def _common(one: TokenIds, other: TokenIds) -> int:
    """How many tokens the two begin with alike."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length
