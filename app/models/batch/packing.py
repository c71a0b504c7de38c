"""Packing: the token sequences of a batch joined end to end into one row, with no padding.

Knows nothing of models or attention kernels. Within a pack the sequences are ordered by length, so
that sequences of equal length lie side by side and can be viewed as one dense block; `unpack_order`
leads back to the order in which they were given.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from app.engine.types import TokenIds
from app.models.batch.length_classes import LengthClass, divide_lengths
from app.models.batch.marks import SECOND_SEGMENT, UNATTENDED, marked, without_marks
from app.models.batch.shared_prefix import Sharing, shared_places

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """How `count` sequences are padded to `length` tokens each.

    `gather` `[count x length]` holds the token at each place of the padded block; at padding it is
    the first token of the same sequence, so that a number that is not finite stays within its
    sequence. `places` `[tokens]` holds the place of each token in the block. `mask`
    `[count, 1, 1, length]` float32 is 0 for tokens and minus infinity for padding.
    """

    count: int
    length: int
    gather: torch.Tensor
    places: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedBlock(Padding):
    """Neighbouring short sequences of similar lengths: the tokens from `start` to `stop`."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartlyAttended(Padding):
    """Sequences that end in unattended tokens; `tokens` `[tokens]` are theirs in the packed row.

    `mask` hides the unattended tokens, too.
    """

    tokens: torch.Tensor


@dataclass(frozen=True)
class PackedBatch:
    """One row of T tokens that holds N sequences.

    `input_ids` and `position_ids` are `[1, T]` int64 on the device, `cu_seqlens` is `[N + 1]` int32
    on the device; `offsets` is the same on the host. `unpack_order[i]` is the packed place of the
    i-th sequence given to `pack`. `sharing` is set if tokens that sequences share are computed
    once, and `partly_attended` if some tokens are not attended to.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    offsets: npt.NDArray[np.int64]
    unpack_order: npt.NDArray[np.intp]
    sharing: Sharing | None = None
    partly_attended: PartlyAttended | None = None

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.input_ids.device

    @property
    def real_tokens(self) -> int:
        """The tokens of the given sequences, without those that only round T up."""
        return int(self.offsets[len(self.unpack_order)])

    @property
    def attended(self) -> torch.Tensor:
        """`[T]` bool: which tokens are attended to."""
        attended = torch.ones(self.tokens, dtype=torch.bool, device=self.device)
        some = self.partly_attended
        if some is not None:
            attended[some.tokens] = some.mask.reshape(-1)[some.places] == 0
        return attended

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each sequence, in packed order."""
        return np.diff(self.offsets).tolist()  # type: ignore[no-any-return]

    @property
    def tokens(self) -> int:
        """T, the tokens of all sequences."""
        return int(self.offsets[-1])

    @cached_property
    def max_length(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths)

    @cached_property
    def length_classes(self) -> list[LengthClass]:
        """All sequences, in packed order, in one class or in several where that is faster."""
        offsets, classes = self.offsets, []
        for part in divide_lengths(self.lengths):
            bounds = offsets[part.start : part.stop + 1]
            start, stop = int(bounds[0]), int(bounds[-1])
            whole = stop - start == self.tokens
            on_device = (
                self.cu_seqlens
                if whole
                else to_device(self.device, (bounds - start).astype(np.int32))
            )
            classes.append(LengthClass(start, stop, max(self.lengths[part]), on_device))
        return classes

    @cached_property
    def blocks(self) -> list[DenseBlock | PaddedBlock]:
        """The given sequences in packed order, in blocks of equal or, if short, similar length."""
        blocks: list[DenseBlock | PaddedBlock] = []
        start = 0
        for _, near in groupby(self.lengths[: len(self.unpack_order)], key=_bucket):
            lengths = list(near)
            dense = DenseBlock(start, len(lengths), lengths[0])
            even = lengths[0] == lengths[-1]
            blocks.append(dense if even else _padded_block(start, lengths, self.input_ids.device))
            start += sum(lengths)
        return blocks


def _bucket(length: int) -> int:
    """Sequences of one bucket form a block; long ones only with others of the same length."""
    return length if length > _LONGEST_PADDED else -(-length // _BUCKET_WIDTH) - _LONGEST_PADDED


def _padded_block(start: int, lengths: list[int], device: torch.device) -> PaddedBlock:
    longest, tokens = lengths[-1], sum(lengths)
    filled = np.arange(longest) < np.array(lengths)[:, None]
    places = np.flatnonzero(filled)
    firsts = start + np.concatenate(([0], np.cumsum(lengths[:-1])))
    gather = np.repeat(firsts, longest)
    gather[places] = np.arange(start, start + tokens)
    return PaddedBlock(
        start=start,
        stop=start + tokens,
        count=len(lengths),
        length=longest,
        gather=to_device(device, gather),
        places=to_device(device, places),
        mask=to_device(device, np.where(filled, np.float32(0), np.float32(-np.inf)))[:, None, None],
    )


def pack(
    sequences: Sequence[TokenIds],
    *,
    device: torch.device,
    roberta_padding: int | None = None,
    segment_positions: int = 0,
    multiple: int = 1,
    causal: bool = False,
) -> PackedBatch:
    """Join non-empty token sequences end to end; positions restart in each.

    Positions count from 0, or, with RoBERTa's padding id `roberta_padding`, as RoBERTa's do. Tokens
    that are marked as of the second segment have `segment_positions` added. T is rounded up to a
    multiple of `multiple` by one more sequence at the end, which is not in `unpack_order`. In a
    `causal` model common prefixes are computed once.
    """
    order = np.argsort([len(ids) for ids in sequences], kind="stable")
    rows = [sequences[i] for i in order]
    filler = -sum(map(len, rows)) % multiple
    if filler:
        rows.append(np.zeros(filler, np.int64))
    offsets = np.concatenate(([0], np.cumsum([len(row) for row in rows])))
    joined = np.concatenate(rows)
    input_ids = without_marks(joined)
    if roberta_padding is None:
        position_ids = _count(np.ones_like(input_ids), offsets) - 1
    else:
        position_ids = _roberta_positions(input_ids, offsets, roberta_padding)
    if segment_positions:
        position_ids += segment_positions * marked(joined, SECOND_SEGMENT)
    return PackedBatch(
        input_ids=to_device(device, input_ids)[None],
        position_ids=to_device(device, position_ids)[None],
        cu_seqlens=to_device(device, offsets.astype(np.int32)),
        offsets=offsets,
        unpack_order=np.argsort(order),
        sharing=_share(rows, device, multiple) if causal else None,
        partly_attended=_partly_attended(marked(joined, UNATTENDED), offsets, device),
    )


def _partly_attended(
    unattended: npt.NDArray[np.bool_], offsets: TokenIds, device: torch.device
) -> PartlyAttended | None:
    if not unattended.any():
        return None
    left_out = np.add.reduceat(unattended, offsets[:-1], dtype=np.int64)
    starts, lengths = offsets[:-1][left_out > 0], np.diff(offsets)[left_out > 0]
    longest = int(lengths.max())
    place = np.arange(longest)
    filled = place < lengths[:, None]
    attended = place < (lengths - left_out[left_out > 0])[:, None]
    every = starts[:, None] + place
    mask = np.where(attended, np.float32(0), np.float32(-np.inf))
    return PartlyAttended(
        tokens=to_device(device, every[filled]),
        count=len(starts),
        length=longest,
        gather=to_device(device, np.where(filled, every, starts[:, None]).ravel()),
        places=to_device(device, np.flatnonzero(filled)),
        mask=to_device(device, mask)[:, None, None],
    )


def _share(rows: list[TokenIds], device: torch.device, multiple: int) -> Sharing | None:
    """Share common prefixes; the tokens that are computed are rounded up by repeating the first."""
    places = shared_places(rows)
    if places is None:
        return None
    computed, spread = places
    padded = np.pad(computed, (0, -len(computed) % multiple), constant_values=computed[0])
    return Sharing(to_device(device, padded), to_device(device, spread))


def to_device(device: torch.device, array: npt.NDArray[Any]) -> torch.Tensor:
    """Copy an array to the device; to a CUDA device without waiting for the copy."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    # From pageable memory the copy would wait for the forward that still runs.
    return tensor.pin_memory().to(device, non_blocking=True)


def _roberta_positions(input_ids: TokenIds, offsets: TokenIds, padding: int) -> TokenIds:
    """From `padding + 1` on; a padding token that a text spells out stays at `padding`."""
    real = (input_ids != padding).astype(np.int64)
    positions: TokenIds = _count(real, offsets) * real + padding
    return positions


def _count(flags: TokenIds, offsets: TokenIds) -> TokenIds:
    """Running count of the set `flags`, begun anew at every offset."""
    running = np.cumsum(flags)
    before = np.concatenate(([0], running))[offsets[:-1]]
    counted: TokenIds = running - np.repeat(before, np.diff(offsets))
    return counted
