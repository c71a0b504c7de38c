"""Pooling: from the hidden states of a text's tokens to one vector, in float32.

Each is a pooling of sentence-transformers, which the tests compare with.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from app.models.batch.arrays import Indices, to_device
from app.models.batch.packing import PackedBatch


def pool(
    hidden: Tensor, packed: PackedBatch, poolings: Sequence[str], sequences: Indices
) -> Tensor:
    """`[S, poolings x hidden]` float32 of the `sequences`, packed indices, from `[T, hidden]`.

    The vectors of several poolings are concatenated.
    """
    chosen = to_device(packed.device, sequences)
    pooled = [_POOLINGS[name](hidden, packed).index_select(0, chosen) for name in poolings]
    return torch.cat(pooled, dim=-1)


def first(hidden: Tensor, packed: PackedBatch) -> Tensor:
    """`[N, hidden]`: the state of each sequence's first token, in packed order."""
    return hidden[packed.cu_seqlens[:-1].long()].float()


def last(hidden: Tensor, packed: PackedBatch) -> Tensor:
    """`[N, hidden]`: the state of each sequence's last token, in packed order."""
    return hidden[packed.cu_seqlens[1:].long() - 1].float()


def mean(hidden: Tensor, packed: PackedBatch) -> Tensor:
    """`[N, hidden]`: the mean of each sequence's states, in packed order."""
    return _reduced(hidden, packed, "mean")


def _max(hidden: Tensor, packed: PackedBatch) -> Tensor:
    return _reduced(hidden, packed, "max")


def _mean_sqrt_length(hidden: Tensor, packed: PackedBatch) -> Tensor:
    return _reduced(hidden, packed, "sum") / _lengths(packed).sqrt()[:, None]


def _weighted_mean(hidden: Tensor, packed: PackedBatch) -> Tensor:
    """The mean with weight 1 for the first token, 2 for the second, and so on."""
    offsets = packed.offsets
    ranks = np.arange(1, packed.tokens + 1) - np.repeat(offsets[:-1], np.diff(offsets))
    weights = to_device(packed.device, ranks.astype(np.float32))[:, None]
    lengths = _lengths(packed).float()
    total = lengths * (lengths + 1) / 2
    return _reduced(hidden.float() * weights, packed, "sum") / total[:, None]


def _reduced(states: Tensor, packed: PackedBatch, how: str) -> Tensor:
    if states.device.type == "mps":  # PyTorch has no `segment_reduce` there.
        return one_by_one(states, packed, how)
    # `unsafe` leaves out checks of the lengths, for which PyTorch would wait for the device.
    return torch.segment_reduce(states.float(), how, lengths=_lengths(packed), unsafe=True)


def one_by_one(states: Tensor, packed: PackedBatch, how: str) -> Tensor:
    """`[N, hidden]`: the mean, max or sum of each sequence's states, by an operator for each."""
    parts = torch.split(states.float(), packed.lengths)
    match how:
        case "mean":
            return torch.stack([part.mean(0) for part in parts])
        case "max":
            return torch.stack([part.amax(0) for part in parts])
    return torch.stack([part.sum(0) for part in parts])


def _lengths(packed: PackedBatch) -> Tensor:
    return packed.cu_seqlens.long().diff()


_POOLINGS: dict[str, Callable[[Tensor, PackedBatch], Tensor]] = {
    "cls": first,
    "last_token": last,
    "max": _max,
    "mean": mean,
    "mean_sqrt_length": _mean_sqrt_length,
    "weighted_mean": _weighted_mean,
}
