"""Blocks of a packed batch: neighbouring sequences as one dense tensor, padded where necessary."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Self

import numpy as np
import torch

from app.models.batch.arrays import Indices, to_device

# A call for every length costs more than padding does while sequences are this short.
_LONGEST_PADDED = 64
_BUCKET_WIDTH = 16


@dataclass(frozen=True, slots=True)
class DenseBlock:
    """Neighbouring sequences of one length: `count` of `length` tokens from token `start`."""

    start: int
    count: int
    length: int

    @property
    def stop(self) -> int:
        """The first token after the block."""
        return self.start + self.count * self.length


@dataclass(frozen=True, slots=True)
class Padding:
    """How `count` sequences are padded to `length` slots each; all tensors are on the device.

    `tokens` `[n]` are the sequences' tokens in the packed row, and `slots` `[n]` where each of them
    is in the padded block. `token_of_slot` `[count x length]` is the token in each slot; in a slot
    of padding it is the first token of the same sequence, so that a number that is not finite stays
    within its sequence. `mask` `[count, 1, 1, length]` float32 is 0 for attended tokens and minus
    infinity for all other slots.
    """

    count: int
    length: int
    tokens: torch.Tensor
    slots: torch.Tensor
    token_of_slot: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def of(cls, starts: Indices, lengths: Indices, attended: Indices, device: torch.device) -> Self:
        """Pad sequences that begin at the tokens `starts`; of each the first `attended` count.

        All three are `[count]`.
        """
        slot = np.arange(lengths.max())
        filled, token = slot < lengths[:, None], starts[:, None] + slot
        mask = np.where(slot < attended[:, None], np.float32(0), np.float32(-np.inf))
        return cls(
            len(starts),
            len(slot),
            tokens=to_device(device, token[filled]),
            slots=to_device(device, np.flatnonzero(filled)),
            token_of_slot=to_device(device, np.where(filled, token, starts[:, None]).ravel()),
            mask=to_device(device, mask)[:, None, None],
        )


@dataclass(frozen=True, slots=True)
class PaddedBlock:
    """Neighbouring short sequences of similar lengths: the tokens from `start` to `stop`."""

    start: int
    stop: int
    padding: Padding


Block = DenseBlock | PaddedBlock


def divide_into_blocks(lengths: list[int], device: torch.device) -> Iterator[Block]:
    """Divide sequences of ascending `lengths` into blocks of equal or, if short, similar length."""
    start = 0
    for _, near in groupby(lengths, key=_bucket):
        block = list(near)
        stop = start + sum(block)
        if block[0] == block[-1]:
            yield DenseBlock(start, len(block), block[0])
        else:
            sizes = np.array(block)
            starts = start + np.cumsum(sizes) - sizes
            yield PaddedBlock(start, stop, Padding.of(starts, sizes, sizes, device))
        start = stop


def _bucket(length: int) -> int:
    """Sequences of one bucket form a block; long ones only with others of the same length."""
    return length if length > _LONGEST_PADDED else -(-length // _BUCKET_WIDTH) - _LONGEST_PADDED
