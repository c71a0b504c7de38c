"""Packing: the token sequences of a batch joined end to end into one row, with no padding.

Knows nothing of models or attention kernels. Sequences are ordered by length, so that those of
equal length lie side by side and can be viewed as one dense block; `unpack_order` leads back.
Kernels are given the row in blocks, neighbouring sequences as one dense tensor, padded where
necessary, or in length classes, neighbours that a kernel for packed sequences computes in one call.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from smart_embedder.tokens import TokenIds

Indices = npt.NDArray[np.int64]
# The one token of a sequence whose state is read.
End = Literal["first", "last"]
# The bits of a token's id; those above are marks.
TOKEN_ID = (1 << 28) - 1
# A token of the second text of a pair, to which BERT adds another type embedding.
SECOND_SEGMENT = 1 << 28
# A token at the end of its sequence to which no token attends, not even itself.
UNATTENDED = 1 << 29
# A token without a ColBERT vector.
WITHOUT_VECTOR = 1 << 30


def to_device(device: torch.device, array: npt.NDArray[Any]) -> Tensor:
    """Copy an array to the device; to a CUDA device without waiting for the copy."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    # From pageable memory the copy would wait for the forward that still runs.
    return tensor.pin_memory().to(device, non_blocking=True)


def _copy_together(device: torch.device, arrays: Sequence[npt.NDArray[Any]]) -> list[Tensor]:
    """As `to_device`, to a CUDA device by one copy. Wider numbers come before narrower ones."""
    if device.type != "cuda":
        return [to_device(device, each) for each in arrays]
    joined = to_device(device, np.concatenate([each.view(np.uint8) for each in arrays]))
    parts = torch.split(joined, [each.nbytes for each in arrays])
    types = [torch.from_numpy(each[:0]).dtype for each in arrays]
    return [part.view(dtype) for part, dtype in zip(parts, types, strict=True)]


# A call for every length costs more than padding does while sequences are this short.
_MAX_PADDED_LENGTH = 64
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
    tokens: Tensor
    slots: Tensor
    token_of_slot: Tensor
    mask: Tensor

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


def _length_bucket(length: int) -> int:
    """Sequences of one bucket form a block; long ones only with others of the same length."""
    return (
        length if length > _MAX_PADDED_LENGTH else -(-length // _BUCKET_WIDTH) - _MAX_PADDED_LENGTH
    )


def group_for_padding(lengths: list[int], max_padding: float, max_pairs: float) -> Iterator[slice]:
    """Groups of neighbours, of ascending lengths, that need little padding.

    Padding is at most the share `max_padding` of a group's tokens, and a group of several has at
    most `max_pairs` pairs of tokens, each of one text with its padding.
    """
    start = tokens = 0
    for index, length in enumerate(lengths):
        padded = (index + 1 - start) * length
        too_many = padded > (1 + max_padding) * (tokens + length) or padded * length > max_pairs
        if index > start and too_many:
            yield slice(start, index)
            start, tokens = index, 0
        tokens += length
    yield slice(start, len(lengths))


# Queries in one block of threads, as in FlashAttention's kernels for packed sequences.
QUERIES_PER_BLOCK = 128
# The cost of one more call, as a number of superfluous blocks for each head.
CALL_COST = 256
# The most blocks of threads in the second and third dimension of a grid, one for each sequence.
_MAX_SEQUENCES = 65_535


@dataclass(frozen=True, slots=True)
class LengthClass:
    """Neighbouring sequences, the tokens from `start` to `stop`, the longest of `longest` tokens.

    `bounds` int32 on the device are their cumulative lengths, from 0.
    """

    start: int
    stop: int
    longest: int
    bounds: Tensor


def divide_lengths(lengths: Sequence[int]) -> list[slice]:
    """Divide sequences of ascending lengths so that all calls together cost least."""
    blocks = -(-np.asarray(lengths) // QUERIES_PER_BLOCK)
    groups = np.flatnonzero(np.diff(np.ceil(np.log2(blocks)))) + 1
    borders = [0, *groups.tolist(), len(blocks)]
    # For each border the least cost up to it, and the borders between the classes up to it.
    best: list[tuple[int, list[int]]] = [(0, [0])]
    for stop in borders[1:]:
        highest = int(blocks[stop - 1])
        ways = (
            (cost + CALL_COST + (stop - before[-1]) * highest, [*before, stop])
            for cost, before in best
        )
        best.append(min(ways, key=itemgetter(0)))
    return [
        slice(start, min(start + _MAX_SEQUENCES, last))
        for first, last in pairwise(best[-1][1])
        for start in range(first, last, _MAX_SEQUENCES)
    ]


@dataclass(frozen=True, slots=True)
class PositionScheme:
    """Positions count from 0 in each sequence, or as RoBERTa's do.

    RoBERTa's count from `roberta_padding` + 1, its padding id; a padding token that a text spells
    out stays at `roberta_padding`. Tokens of the second segment have `segment_offset` added.
    """

    roberta_padding: int | None = None
    segment_offset: int = 0

    def position_ids(self, marked_ids: TokenIds, offsets: Indices) -> Indices:
        """`[T]`, of sequences that begin at `offsets` `[N + 1]`, of which the last one is T."""
        padding = -1 if self.roberta_padding is None else self.roberta_padding
        # No token has the id -1, and counting on from it begins at 0.
        counted = ((marked_ids & TOKEN_ID) != padding).astype(np.int64)
        running = np.cumsum(counted)
        before = np.concatenate(([0], running))[offsets[:-1]]
        positions: Indices = (running - np.repeat(before, np.diff(offsets))) * counted + padding
        if self.segment_offset:
            positions += self.segment_offset * ((marked_ids & SECOND_SEGMENT) != 0)
        return positions


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
    once, `partly_attended` if some tokens are not attended to: how the sequences that end in such
    tokens are padded.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    offsets: Indices
    unpack_order: npt.NDArray[np.intp]
    sharing: Sharing | None = None
    partly_attended: Padding | None = None

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.input_ids.device

    @property
    def tokens(self) -> int:
        """T, the tokens of all sequences."""
        return int(self.offsets[-1])

    @property
    def real_tokens(self) -> int:
        """The tokens of the given sequences, without those that only round T up."""
        return int(self.offsets[len(self.unpack_order)])

    @property
    def attended(self) -> Tensor:
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

    @cached_property
    def max_length(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths)

    @cached_property
    def pairs(self) -> int:
        """How many pairs of tokens are within one sequence: the scores of a head."""
        return int((np.diff(self.offsets) ** 2).sum())

    @cached_property
    def length_classes(self) -> list[LengthClass]:
        """All sequences, in packed order, in one class or in several where that is faster."""
        classes = []
        for sequences in divide_lengths(self.lengths):
            bounds = self.offsets[sequences.start : sequences.stop + 1]
            start, stop = int(bounds[0]), int(bounds[-1])
            cu_seqlens = self.cu_seqlens
            if stop - start < self.tokens:
                cu_seqlens = to_device(self.device, (bounds - start).astype(np.int32))
            classes.append(LengthClass(start, stop, max(self.lengths[sequences]), cu_seqlens))
        return classes

    @cached_property
    def blocks(self) -> list[Block]:
        """The given sequences in packed order, in blocks of equal or, if short, similar length."""
        blocks, start = list[Block](), 0
        for _, near in groupby(self.lengths[: len(self.unpack_order)], key=_length_bucket):
            block = list(near)
            stop, padding = start + sum(block), None
            if block[0] < block[-1]:
                sizes = np.array(block)
                padding = Padding.of(start + np.cumsum(sizes) - sizes, sizes, sizes, self.device)
            blocks.append(Block(start, stop, block[-1], padding))
            start = stop
        return blocks

    def select_ends(
        self, end: End, multiple_of: Callable[[int], int]
    ) -> tuple[Tensor, "PackedBatch"]:
        """The first or the last tokens `[R]` of all sequences, and a batch of these tokens alone.

        R is rounded up as in `select_tokens`, and the batch has no more tokens than sequences.
        """
        tokens = self.offsets[:-1] if end == "first" else self.offsets[1:] - 1
        rows = to_device(self.device, _round_up(tokens, multiple_of))
        offsets = np.arange(len(self.offsets))
        alone = PackedBatch(
            input_ids=self.input_ids[:, rows],
            position_ids=self.position_ids[:, rows],
            cu_seqlens=to_device(self.device, offsets.astype(np.int32)),
            offsets=offsets,
            unpack_order=self.unpack_order,
        )
        return rows, alone


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
    order = np.argsort(list(map(len, sequences)), kind="stable")
    packed = list(map(sequences.__getitem__, order))
    missing = -sum(map(len, packed)) % multiple
    if missing:
        packed.append(np.zeros(missing, np.int64))
    lengths = np.array(list(map(len, packed)))
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    joined = np.concatenate(packed)
    sharing = None
    if causal and (shared := find_shared_prefixes(packed)):
        unique, inverse = shared
        # What is computed is rounded up, too, by repeating the first token.
        unique = np.pad(unique, (0, -len(unique) % multiple), constant_values=unique[0])
        sharing = Sharing(to_device(device, unique), to_device(device, inverse))
    partly_attended = None
    unattended = (joined & UNATTENDED) != 0
    if unattended.any():
        left_out = np.add.reduceat(unattended, offsets[:-1], dtype=np.int64)
        starts, chosen = offsets[:-1], left_out > 0
        partly_attended = Padding.of(
            starts[chosen], lengths[chosen], (lengths - left_out)[chosen], device
        )
    input_ids, position_ids, cu_seqlens = _copy_together(
        device,
        (joined & TOKEN_ID, positions.position_ids(joined, offsets), offsets.astype(np.int32)),
    )
    return PackedBatch(
        input_ids=input_ids[None],
        position_ids=position_ids[None],
        cu_seqlens=cu_seqlens,
        offsets=offsets,
        unpack_order=np.argsort(order),
        sharing=sharing,
        partly_attended=partly_attended,
    )


# The rows of each sequence, in the order given to `pack`; None for one without rows.
Spans = list[slice | None]


def select_tokens(
    packed: PackedBatch, selected: Sequence[bool], multiple_of: Callable[[int], int]
) -> tuple[Tensor | None, Spans]:
    """The tokens `[R]` int64, on the device, of the selected sequences; None for all tokens.

    `selected` is in the order given to `pack`. R is rounded up to a multiple of `multiple_of(R)` by
    repeating a token. Also returns where those of each sequence lie among the selected ones.
    """
    offsets, order = packed.offsets, packed.unpack_order
    spans = [slice(int(offsets[index]), int(offsets[index + 1])) for index in order]
    if all(selected):
        return None, list(spans)
    chosen = [span for span, want in zip(spans, selected, strict=True) if want]
    tokens = np.concatenate([np.arange(span.start, span.stop) for span in chosen])
    rows = to_device(packed.device, _round_up(tokens, multiple_of))
    return rows, _join_spans(spans, selected)


def _round_up(tokens: Indices, multiple_of: Callable[[int], int]) -> Indices:
    return np.pad(tokens, (0, -len(tokens) % multiple_of(len(tokens))), mode="edge")


def select_sequences(packed: PackedBatch, selected: Sequence[bool]) -> tuple[Indices, Spans]:
    """The packed indices `[S]` of the selected sequences, in the order given to `pack`.

    Also returns, for each sequence given to `pack`, the span of its one row among those.
    """
    indices = packed.unpack_order[np.flatnonzero(selected)].astype(np.int64)
    return indices, _join_spans([slice(0, 1)] * len(selected), selected)


def _join_spans(spans: list[slice], selected: Sequence[bool]) -> Spans:
    """The spans of the selected sequences moved together."""
    moved: Spans = []
    start = 0
    for span, want in zip(spans, selected, strict=True):
        length = span.stop - span.start
        moved.append(slice(start, start + length) if want else None)
        start += length * want
    return moved


# The least share of tokens that must be saved, because gathering has a cost in every layer.
_MIN_SAVED = 1 / 16


def find_shared_prefixes(sequences: Sequence[TokenIds]) -> tuple[Indices, Indices] | None:
    """`unique` and `inverse` of the sequences joined end to end; None where little is shared."""
    if len(sequences) == 1:
        return None
    joined = np.concatenate(sequences)
    # In dictionary order each one shares at least as much with the one before it as with any other
    # that comes before.
    keys = [ids.astype(">i8").tobytes() for ids in sequences]
    order = np.array(sorted(range(len(keys)), key=keys.__getitem__))
    lengths = np.array([len(ids) for ids in sequences])
    starts, lengths = _start_offsets(lengths)[order], lengths[order]
    most = np.minimum(lengths[1:], lengths[:-1])
    differ = joined[_join_ranges(starts[1:], most)] != joined[_join_ranges(starts[:-1], most)]
    within = np.where(differ, _join_ranges(np.zeros_like(most), most), np.repeat(most, most))
    shared = np.minimum.reduceat(within, _start_offsets(most))
    if shared.sum() < _MIN_SAVED * len(joined):
        return None
    computed = np.ones(len(joined), bool)
    computed[_join_ranges(starts[1:], shared)] = False
    inverse = np.cumsum(computed) - 1
    # One after the other: what is taken may have been taken by the one before.
    for (before, start), count in zip(pairwise(starts.tolist()), shared.tolist(), strict=True):
        if count:
            inverse[start : start + count] = inverse[before : before + count]
    return np.flatnonzero(computed), inverse


def _start_offsets(lengths: Indices) -> Indices:
    return np.cumsum(lengths) - lengths


def _join_ranges(starts: Indices, lengths: Indices) -> Indices:
    """From each start on so many numbers, one after the other."""
    return np.arange(lengths.sum()) + np.repeat(starts - _start_offsets(lengths), lengths)
