"""Packing: the token sequences of a batch joined end to end into one row, with no padding.

Knows nothing of models or attention kernels. Within a pack the sequences are ordered by length, so
that sequences of equal length lie side by side and can be viewed as one dense block; `unpack_order`
leads back to the order in which they were given.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from app.engine.types import TokenIds
from app.models.batch.arrays import Indices, to_device
from app.models.batch.blocks import Block, Padding, divide_into_blocks
from app.models.batch.length_classes import LengthClass, divide_lengths
from app.models.batch.marks import UNATTENDED, marked, without_marks
from app.models.batch.position_ids import PositionScheme
from app.models.batch.shared_prefix import Sharing, find_shared_prefixes

_FROM_ZERO = PositionScheme()


@dataclass(frozen=True)
class PackedBatch:
    """One row of T tokens that holds N sequences.

    `input_ids` and `position_ids` are `[1, T]` int64 on the device, `cu_seqlens` is `[N + 1]` int32
    on the device; `offsets` is the same on the host. `unpack_order[i]` is the packed index of the
    i-th sequence given to `pack`. `sharing` is set if tokens that sequences share are computed
    once. `partly_attended` is set if some tokens are not attended to: how the sequences that end in
    such tokens are padded.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    offsets: Indices
    unpack_order: npt.NDArray[np.intp]
    sharing: Sharing | None = None
    partly_attended: Padding | None = None

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
        padding = self.partly_attended
        if padding is not None:
            attended[padding.tokens] = padding.mask.reshape(-1)[padding.slots] == 0
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
        return [self._length_class(sequences) for sequences in divide_lengths(self.lengths)]

    def _length_class(self, sequences: slice) -> LengthClass:
        bounds = self.offsets[sequences.start : sequences.stop + 1]
        start, stop = int(bounds[0]), int(bounds[-1])
        if stop - start == self.tokens:
            cu_seqlens = self.cu_seqlens
        else:
            cu_seqlens = to_device(self.device, (bounds - start).astype(np.int32))
        return LengthClass(start, stop, max(self.lengths[sequences]), cu_seqlens)

    @cached_property
    def blocks(self) -> list[Block]:
        """The given sequences in packed order, in blocks of equal or, if short, similar length."""
        return list(divide_into_blocks(self.lengths[: len(self.unpack_order)], self.device))


def pack(
    sequences: Sequence[TokenIds],
    *,
    device: torch.device,
    positions: PositionScheme = _FROM_ZERO,
    multiple: int = 1,
    causal: bool = False,
) -> PackedBatch:
    """Join non-empty sequences of marked token ids end to end; positions restart in each.

    T is rounded up to a multiple of `multiple` by one more sequence at the end, which is not in
    `unpack_order`. In a `causal` model common prefixes are computed once.
    """
    order = np.argsort([len(ids) for ids in sequences], kind="stable")
    packed = _round_up([sequences[i] for i in order], multiple)
    offsets = np.concatenate(([0], np.cumsum([len(ids) for ids in packed])))
    joined = np.concatenate(packed)
    ids = without_marks(joined)
    return PackedBatch(
        input_ids=to_device(device, ids)[None],
        position_ids=to_device(device, positions.position_ids(ids, joined, offsets))[None],
        cu_seqlens=to_device(device, offsets.astype(np.int32)),
        offsets=offsets,
        unpack_order=np.argsort(order),
        sharing=_share(packed, device, multiple) if causal else None,
        partly_attended=_partly_attended(marked(joined, UNATTENDED), offsets, device),
    )


def _round_up(sequences: list[TokenIds], multiple: int) -> list[TokenIds]:
    """Append a sequence of zeros if the tokens of all are no multiple of `multiple`."""
    missing = -sum(map(len, sequences)) % multiple
    return [*sequences, np.zeros(missing, np.int64)] if missing else sequences


def _partly_attended(
    unattended: npt.NDArray[np.bool_], offsets: Indices, device: torch.device
) -> Padding | None:
    """How sequences that end in `unattended` tokens are padded; None if there are none."""
    if not unattended.any():
        return None
    left_out = np.add.reduceat(unattended, offsets[:-1], dtype=np.int64)
    chosen = left_out > 0
    lengths = np.diff(offsets)[chosen]
    return Padding.of(offsets[:-1][chosen], lengths, lengths - left_out[chosen], device)


def _share(sequences: list[TokenIds], device: torch.device, multiple: int) -> Sharing | None:
    """Share common prefixes; the tokens that are computed are rounded up by repeating the first."""
    found = find_shared_prefixes(sequences)
    if found is None:
        return None
    unique, inverse = found
    padded = np.pad(unique, (0, -len(unique) % multiple), constant_values=unique[0])
    return Sharing(to_device(device, padded), to_device(device, inverse))
