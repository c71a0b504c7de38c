"""Common prefixes of the sequences in a batch, which a causal model computes once.

In a causal model a token's state depends only on the tokens up to it. Pairs of one query share
their template, instruction and query, and so do texts behind one instruction.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from app.engine.types import TokenIds
from app.models.batch.arrays import Indices

# The least share of tokens that must be saved, because gathering has a cost in every layer.
_LEAST_SAVED = 1 / 16


@dataclass(frozen=True, slots=True)
class Sharing:
    """`unique` `[U]`: the tokens that are computed; `inverse` `[T]`: which of them each one is."""

    unique: Tensor
    inverse: Tensor


def find_shared_prefixes(sequences: Sequence[TokenIds]) -> tuple[Indices, Indices] | None:
    """`unique` and `inverse` of the sequences joined end to end; None where little is shared."""
    lengths = np.array([len(ids) for ids in sequences])
    joined = np.concatenate(sequences)
    order = _dictionary_order(joined, lengths)
    starts = _starts(lengths)[order]
    lengths = lengths[order]
    shared = _shared_with_the_one_before(joined, starts, lengths)
    if shared.sum() < _LEAST_SAVED * len(joined):
        return None
    tokens = _ranges(starts, lengths)
    computed = _ranges(np.zeros_like(starts), lengths) >= np.repeat(shared, lengths)
    number = np.cumsum(computed) - 1
    _take_from_the_one_before(number, _starts(lengths), shared)
    inverse = np.empty_like(tokens)
    inverse[tokens] = number
    return tokens[computed], inverse


def _starts(lengths: Indices) -> Indices:
    return np.cumsum(lengths) - lengths


def _ranges(starts: Indices, lengths: Indices) -> Indices:
    """From each start on so many numbers, one after the other."""
    return np.arange(lengths.sum()) + np.repeat(starts - _starts(lengths), lengths)


def _dictionary_order(joined: TokenIds, lengths: Indices) -> Indices:
    comparable = joined.astype(">i8").tobytes()
    ends = (np.cumsum(lengths) * 8).tolist()
    keys = [comparable[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return np.array(sorted(range(len(keys)), key=keys.__getitem__))


def _shared_with_the_one_before(joined: TokenIds, starts: Indices, lengths: Indices) -> Indices:
    """How many tokens each sequence, in dictionary order, begins with like the one before it.

    No other that comes before begins with more of it.
    """
    most = np.minimum(lengths[1:], lengths[:-1])
    if not len(most):
        return np.zeros_like(starts)
    within = _ranges(np.zeros_like(most), most)
    differ = joined[_ranges(starts[1:], most)] != joined[_ranges(starts[:-1], most)]
    common = np.minimum.reduceat(np.where(differ, within, np.repeat(most, most)), _starts(most))
    return np.concatenate(([0], common))


def _take_from_the_one_before(number: Indices, starts: Indices, shared: Indices) -> None:
    """One after the other: what is taken may have been taken by the one before."""
    before = 0
    for start, count in zip(starts.tolist(), shared.tolist(), strict=True):
        if count:
            number[start : start + count] = number[before : before + count]
        before = start
