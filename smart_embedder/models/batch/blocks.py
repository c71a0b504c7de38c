"""How the sequences of a packed batch are divided for kernels, and what ids say beside the token.

Blocks are neighbouring sequences as one dense tensor, padded where necessary; length classes are
neighbours that a kernel for packed sequences computes in one call.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

Indices = npt.NDArray[np.int64]


def to_device(device: torch.device, array: npt.NDArray[Any]) -> torch.Tensor:
    """Copy an array to the device; to a CUDA device without waiting for the copy."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    # From pageable memory the copy would wait for the forward that still runs.
    return tensor.pin_memory().to(device, non_blocking=True)


# A call for every length costs more than padding does while sequences are this short.
_LONGEST_PADDED = 64
_BUCKET_WIDTH = 16


@dataclass(frozen=True, slots=True)
class Padding:
    """How `count` sequences are padded to `length` slots each; all tensors are on the device.

    `tokens` `[n]` are the sequences' tokens in the packed row, and `slots` `[n]` their places in
    the padded block. `token_of_slot` `[count x length]` is the token in each slot; in padding it is
    the first of the same sequence, so that a number that is not finite stays within its sequence.
    `mask` `[count, 1, 1, length]` float32 is 0 for attended tokens, minus infinity elsewhere.
    """

    count: int
    length: int
    tokens: torch.Tensor
    slots: torch.Tensor
    token_of_slot: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def of(cls, starts: Indices, lengths: Indices, attended: Indices, device: torch.device) -> Self:
        """Pad sequences from the tokens `starts` on; of each the first `attended` ones count."""
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
class Block:
    """Neighbouring sequences, the tokens from `start` to `stop`.

    They are of `length` tokens each, or shorter and of similar lengths; then `padding` is to it.
    """

    start: int
    stop: int
    length: int
    padding: Padding | None = None


def divide_into_blocks(lengths: list[int], device: torch.device) -> Iterator[Block]:
    """Divide sequences of ascending `lengths` into blocks of equal or, if short, similar length."""
    start = 0
    for _, near in groupby(lengths, key=_bucket):
        block = list(near)
        stop, padding = start + sum(block), None
        if block[0] < block[-1]:
            sizes = np.array(block)
            padding = Padding.of(start + np.cumsum(sizes) - sizes, sizes, sizes, device)
        yield Block(start, stop, block[-1], padding)
        start = stop


def _bucket(length: int) -> int:
    """Sequences of one bucket form a block; long ones only with others of the same length."""
    return length if length > _LONGEST_PADDED else -(-length // _BUCKET_WIDTH) - _LONGEST_PADDED


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
    # For each border the least cost up to it, and the borders between the classes up to it.
    best: list[tuple[int, list[int]]] = [(0, [0])]
    for stop in borders[1:]:
        highest = int(blocks[stop - 1])
        ways = (
            (cost + WORTH_A_CALL + (stop - before[-1]) * highest, [*before, stop])
            for cost, before in best
        )
        best.append(min(ways, key=itemgetter(0)))
    return [
        slice(start, min(start + _MOST_SEQUENCES, last))
        for first, last in pairwise(best[-1][1])
        for start in range(first, last, _MOST_SEQUENCES)
    ]


# The bits of a token's id; those above are marks.
TOKEN_ID = (1 << 28) - 1
# A token of the second text of a pair, to which BERT adds another type embedding.
SECOND_SEGMENT = 1 << 28
# A token at the end of its sequence to which no token attends, not even itself.
UNATTENDED = 1 << 29
# A token without a ColBERT vector.
WITHOUT_VECTOR = 1 << 30
