"""Packing: the token sequences of a batch joined end to end into one row, with no padding.

Knows nothing of models or attention kernels. Within a pack the sequences are ordered by length, so
that sequences of equal length lie side by side and can be viewed as one dense block; `unpack_order`
leads back to the order in which they were given.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from smart_embedder.engine.records import TokenIds
from smart_embedder.models.batch.blocks import (
    SECOND_SEGMENT,
    UNATTENDED,
    Block,
    Indices,
    LengthClass,
    Padding,
    divide_into_blocks,
    divide_lengths,
    marked,
    to_device,
    without_marks,
)


@dataclass(frozen=True, slots=True)
class PositionScheme:
    """Positions count from 0 in each sequence, or as RoBERTa's do.

    RoBERTa's count from `roberta_padding` + 1, its padding id; a padding token that a text spells
    out stays at `roberta_padding`. Tokens that are marked as of the second segment have
    `segment_offset` added, if it is not 0.
    """

    roberta_padding: int | None = None
    segment_offset: int = 0

    def position_ids(self, ids: TokenIds, marked_ids: TokenIds, offsets: Indices) -> Indices:
        """`[T]`, of sequences that begin at `offsets` `[N + 1]`, of which the last one is T.

        `ids` `[T]` are without the marks of `marked_ids` `[T]`.
        """
        padding = self.roberta_padding
        if padding is None:
            positions = _count(np.ones_like(ids), offsets) - 1
        else:
            real = (ids != padding).astype(np.int64)
            positions = _count(real, offsets) * real + padding
        if self.segment_offset:
            positions += self.segment_offset * marked(marked_ids, SECOND_SEGMENT)
        return positions


def _count(flags: Indices, offsets: Indices) -> Indices:
    """Running count of the set `flags`, begun anew at every offset."""
    running = np.cumsum(flags)
    before = np.concatenate(([0], running))[offsets[:-1]]
    counted: Indices = running - np.repeat(before, np.diff(offsets))
    return counted


_FROM_ZERO = PositionScheme()


@dataclass(frozen=True, slots=True)
class Sharing:
    """`unique` `[U]`: the tokens that are computed; `inverse` `[T]`: which of them each one is."""

    unique: Tensor
    inverse: Tensor


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
    packed = [sequences[i] for i in order]
    missing = -sum(map(len, packed)) % multiple
    if missing:
        packed.append(np.zeros(missing, np.int64))
    offsets = np.concatenate(([0], np.cumsum([len(ids) for ids in packed])))
    joined = np.concatenate(packed)
    ids = without_marks(joined)
    shared = find_shared_prefixes(packed) if causal else None
    sharing = None
    if shared is not None:
        unique, inverse = shared
        # What is computed is rounded up, too, by repeating the first token.
        unique = np.pad(unique, (0, -len(unique) % multiple), constant_values=unique[0])
        sharing = Sharing(to_device(device, unique), to_device(device, inverse))
    return PackedBatch(
        input_ids=to_device(device, ids)[None],
        position_ids=to_device(device, positions.position_ids(ids, joined, offsets))[None],
        cu_seqlens=to_device(device, offsets.astype(np.int32)),
        offsets=offsets,
        unpack_order=np.argsort(order),
        sharing=sharing,
        partly_attended=_partly_attended(marked(joined, UNATTENDED), offsets, device),
    )


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


# The rows of each sequence, in the order given to `pack`; None for one without rows.
Spans = list[slice | None]


@dataclass(frozen=True, slots=True)
class TokenSelection:
    """Some sequences of a packed batch, token by token.

    `tokens` `[R]` int64 on the device are the selected tokens of the packed row; None selects them
    all. `spans[i]` is where the tokens of the i-th sequence given to `pack` lie among the selected
    ones, None for a sequence that is not selected.
    """

    tokens: Tensor | None
    spans: Spans

    def gather(self, states: Tensor) -> Tensor:
        """`[R, width]`: the states of the selected tokens, of those `[T, width]` of all."""
        return states if self.tokens is None else states.index_select(0, self.tokens)


def select_tokens(
    packed: PackedBatch, selected: Sequence[bool], multiple_of: Callable[[int], int]
) -> TokenSelection:
    """Select the tokens of sequences; `selected` is in the order given to `pack`.

    R is rounded up to a multiple of `multiple_of(R)` by repeating a token.
    """
    offsets, order = packed.offsets, packed.unpack_order
    spans = [slice(int(offsets[index]), int(offsets[index + 1])) for index in order]
    if all(selected):
        return TokenSelection(None, list(spans))
    chosen = [span for span, want in zip(spans, selected, strict=True) if want]
    tokens = np.concatenate([np.arange(span.start, span.stop) for span in chosen])
    padded = np.pad(tokens, (0, -len(tokens) % multiple_of(len(tokens))), mode="edge")
    return TokenSelection(to_device(packed.device, padded), _side_by_side(spans, selected))


def select_sequences(packed: PackedBatch, selected: Sequence[bool]) -> tuple[Indices, Spans]:
    """The packed indices `[S]` of the selected sequences, in the order given to `pack`.

    Also returns, for each sequence given to `pack`, the span of its one row among those.
    """
    indices = packed.unpack_order[np.flatnonzero(selected)].astype(np.int64)
    return indices, _side_by_side([slice(0, 1)] * len(selected), selected)


def _side_by_side(spans: list[slice], selected: Sequence[bool]) -> Spans:
    """The spans of the selected sequences moved together."""
    moved: Spans = []
    start = 0
    for span, want in zip(spans, selected, strict=True):
        length = span.stop - span.start
        moved.append(slice(start, start + length) if want else None)
        start += length * want
    return moved


# The least share of tokens that must be saved, because gathering has a cost in every layer.
_LEAST_SAVED = 1 / 16


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
