"""Packing joins the token sequences of a batch end to end into one row, with no padding.

Knows nothing of models or attention kernels. Sequences are ordered by length, so that those of
equal length lie side by side and can be viewed as one dense block; `unpack_order` restores the
given order. Attention gets the row in blocks, each a dense tensor of neighbouring sequences, padded
if necessary, or in length classes, each for one call of a kernel for packed sequences.
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
# The token of a sequence whose state a head reads.
End = Literal["first", "last"]
# The bits of a token's id. The bits above mark tokens:
TOKEN_ID = (1 << 28) - 1
# a token of the second text of a pair, which has another type embedding in BERT;
SECOND_SEGMENT = 1 << 28
# a token at the end of its sequence to which no token attends, not even itself;
UNATTENDED = 1 << 29
# a token without a ColBERT vector.
WITHOUT_VECTOR = 1 << 30


def to_device(device: torch.device, array: npt.NDArray[Any]) -> Tensor:
    """Copy an array to the device, without waiting for a copy to a CUDA device."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    # A copy from pageable memory would wait for the forward that is running.
    return tensor.pin_memory().to(device, non_blocking=True)


def _copy_together(device: torch.device, arrays: Sequence[npt.NDArray[Any]]) -> list[Tensor]:
    """Copy arrays to the device, to a CUDA device in one copy.

    Arrays of wider numbers come before those of narrower ones, so that all are aligned.
    """
    if device.type != "cuda":
        return [to_device(device, array) for array in arrays]
    joined = to_device(device, np.concatenate([array.view(np.uint8) for array in arrays]))
    parts = torch.split(joined, [array.nbytes for array in arrays])
    types = [torch.from_numpy(array[:0]).dtype for array in arrays]
    return [part.view(dtype) for part, dtype in zip(parts, types, strict=True)]


# Up to this length padding costs less than a call for every length.
_MAX_PADDED_LENGTH = 64
_BUCKET_WIDTH = 16


@dataclass(frozen=True, slots=True)
class Padding:
    """How `count` sequences are padded to `length` slots each; all tensors are on the device.

    `tokens` `[n]` are the indices of the sequences' tokens in the packed row, and `slots` `[n]`
    their indices in the padded block. `token_of_slot` `[count x length]` is the token in each slot.
    Padding repeats the first token of its sequence, so that NaN and infinity stay within the
    sequence. `mask` `[count, 1, 1, length]` float32 is 0 for attended tokens and minus infinity for
    all other slots.
    """

    count: int
    length: int
    tokens: Tensor
    slots: Tensor
    token_of_slot: Tensor
    mask: Tensor

    @classmethod
    def of(cls, starts: Indices, lengths: Indices, attended: Indices, device: torch.device) -> Self:
        """Pad sequences that begin at `starts`; tokens after the first `attended` are masked."""
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

    Each has `length` tokens. If some are shorter, `padding` fills them up to `length`.
    """

    start: int
    stop: int
    length: int
    padding: Padding | None = None


def _length_bucket(length: int) -> int:
    """Return a key: neighbours with equal keys form a block. Long ones have their length's own."""
    return (
        length if length > _MAX_PADDED_LENGTH else -(-length // _BUCKET_WIDTH) - _MAX_PADDED_LENGTH
    )


def group_for_padding(lengths: list[int], max_padding: float, max_pairs: float) -> Iterator[slice]:
    """Divide sequences of ascending lengths into groups that need little padding.

    Padding is at most the share `max_padding` of a group's tokens. A group of several sequences has
    at most `max_pairs` pairs of tokens within a sequence, padding included.
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


# Queries in a block of threads, as in FlashAttention's kernels for packed sequences.
QUERIES_PER_BLOCK = 128
# The cost of a further call, in blocks of threads that have nothing to compute, for each head.
CALL_COST = 256
# The most blocks of threads in a grid's second and third dimension; each sequence takes one.
_MAX_SEQUENCES = 65_535


@dataclass(frozen=True, slots=True)
class LengthClass:
    """Neighbouring sequences, the tokens from `start` to `stop`, for one call of a kernel.

    `longest` is the length of the longest one. `bounds` int32, on the device, are the cumulative
    lengths, from 0.
    """

    start: int
    stop: int
    longest: int
    bounds: Tensor


def divide_lengths(lengths: Sequence[int]) -> list[slice]:
    """Divide sequences of ascending lengths into classes so that all calls together cost least.

    A call launches as many blocks of threads for each sequence as the longest one needs.
    """
    blocks = -(-np.asarray(lengths) // QUERIES_PER_BLOCK)
    groups = np.flatnonzero(np.diff(np.ceil(np.log2(blocks)))) + 1
    borders = [0, *groups.tolist(), len(blocks)]
    # For each border, the lowest cost of the sequences before it, and the borders of their classes.
    best: list[tuple[int, list[int]]] = [(0, [0])]
    for stop in borders[1:]:
        longest = int(blocks[stop - 1])
        candidates = (
            (cost + CALL_COST + (stop - before[-1]) * longest, [*before, stop])
            for cost, before in best
        )
        best.append(min(candidates, key=itemgetter(0)))
    return [
        slice(start, min(start + _MAX_SEQUENCES, last))
        for first, last in pairwise(best[-1][1])
        for start in range(first, last, _MAX_SEQUENCES)
    ]


@dataclass(frozen=True, slots=True)
class PositionScheme:
    """How the positions of a sequence's tokens are counted: from 0, or as in RoBERTa.

    RoBERTa counts from `roberta_padding` + 1, where `roberta_padding` is the id of its padding
    token. If a text contains that token, its position is `roberta_padding`. `segment_offset` is
    added to the positions of the second segment.
    """

    roberta_padding: int | None = None
    segment_offset: int = 0

    def position_ids(self, marked_ids: TokenIds, offsets: Indices) -> Indices:
        """Return the positions `[T]` of sequences with the offsets `[N + 1]`, from 0 to T."""
        # No token has the id -1, and counting from -1 + 1 begins at 0.
        padding = -1 if self.roberta_padding is None else self.roberta_padding
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
    """Common prefixes that are computed once.

    `unique` `[U]` are the tokens that are computed; `inverse` `[T]` is the index in `unique` for
    each token.
    """

    unique: Tensor
    inverse: Tensor


@dataclass(frozen=True)
class PackedBatch:
    """One row of T tokens that holds N sequences.

    `input_ids` and `position_ids` are `[1, T]` int64 on the device, `cu_seqlens` is `[N + 1]` int32
    on the device; `offsets` is the same on the host. `unpack_order[i]` is the packed index of the
    i-th sequence given to `pack`. `sharing` is set if common prefixes are computed once.
    `partly_attended` is the padding of the sequences that end in unattended tokens, if there are
    any.
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
        """The device of all tensors."""
        return self.input_ids.device

    @property
    def tokens(self) -> int:
        """T, the number of tokens in the row."""
        return int(self.offsets[-1])

    @property
    def real_tokens(self) -> int:
        """The number of tokens of the given sequences, without those that only round T up."""
        return int(self.offsets[len(self.unpack_order)])

    @property
    def attended(self) -> Tensor:
        """`[T]` bool: whether each token is attended to."""
        attended = torch.ones(self.tokens, dtype=torch.bool, device=self.device)
        padding = self.partly_attended
        if padding is not None:
            attended[padding.tokens] = padding.mask.reshape(-1)[padding.slots] == 0
        return attended

    @cached_property
    def lengths(self) -> list[int]:
        """The length of each sequence, in packed order."""
        return np.diff(self.offsets).tolist()  # type: ignore[no-any-return]

    @cached_property
    def max_length(self) -> int:
        """The length of the longest sequence."""
        return max(self.lengths)

    @cached_property
    def pairs(self) -> int:
        """The number of pairs of tokens within a sequence: the scores of one head."""
        return int((np.diff(self.offsets) ** 2).sum())

    @cached_property
    def length_classes(self) -> list[LengthClass]:
        """All sequences, in packed order, in one class, or in several if that is faster."""
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
        """The given sequences, in packed order, in blocks of equal or, if short, similar length."""
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
        """Return the first or last tokens `[R]` of all sequences, and a batch of these tokens.

        R is rounded up as in `select_tokens`. In the batch each sequence has one token.
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

    A further sequence at the end, which is not in `unpack_order`, rounds T up to a multiple of
    `multiple`. With `causal`, common prefixes are computed once.
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
        # The computed tokens are rounded up, too, by repeating the first one.
        unique = np.pad(unique, (0, -len(unique) % multiple), constant_values=unique[0])
        sharing = Sharing(to_device(device, unique), to_device(device, inverse))
    partly_attended = None
    unattended = (joined & UNATTENDED) != 0
    if unattended.any():
        num_unattended = np.add.reduceat(unattended, offsets[:-1], dtype=np.int64)
        starts, chosen = offsets[:-1], num_unattended > 0
        partly_attended = Padding.of(
            starts[chosen], lengths[chosen], (lengths - num_unattended)[chosen], device
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
    """Return the indices `[R]` of the selected sequences' tokens, and the span of each sequence.

    The indices are int64 on the device; None means all tokens. `selected` is in the order given to
    `pack`. R is rounded up to a multiple of `multiple_of(R)` by repeating a token. Spans are
    positions among the selected tokens.
    """
    offsets, order = packed.offsets, packed.unpack_order
    spans = [slice(int(offsets[index]), int(offsets[index + 1])) for index in order]
    if all(selected):
        return None, list(spans)
    chosen = [span for span, is_chosen in zip(spans, selected, strict=True) if is_chosen]
    tokens = np.concatenate([np.arange(span.start, span.stop) for span in chosen])
    rows = to_device(packed.device, _round_up(tokens, multiple_of))
    return rows, _join_spans(spans, selected)


def _round_up(tokens: Indices, multiple_of: Callable[[int], int]) -> Indices:
    return np.pad(tokens, (0, -len(tokens) % multiple_of(len(tokens))), mode="edge")


def select_sequences(packed: PackedBatch, selected: Sequence[bool]) -> tuple[Indices, Spans]:
    """Return the packed indices `[S]` of the selected sequences, and the span of each sequence.

    Both are in the order given to `pack`. A sequence's span is its one row among the S.
    """
    indices = packed.unpack_order[np.flatnonzero(selected)].astype(np.int64)
    return indices, _join_spans([slice(0, 1)] * len(selected), selected)


def _join_spans(spans: list[slice], selected: Sequence[bool]) -> Spans:
    """Shift the spans of the selected sequences so that no gaps are between them."""
    moved: Spans = []
    start = 0
    for span, is_chosen in zip(spans, selected, strict=True):
        length = span.stop - span.start
        moved.append(slice(start, start + length) if is_chosen else None)
        start += length * is_chosen
    return moved


# The smallest share of tokens whose sharing is worth it: gathering has a cost in every layer.
_MIN_SAVED = 1 / 16


def find_shared_prefixes(sequences: Sequence[TokenIds]) -> tuple[Indices, Indices] | None:
    """Return `unique` and `inverse` of `Sharing`; None if sequences share few tokens."""
    if len(sequences) == 1:
        return None
    joined = np.concatenate(sequences)
    # In lexicographic order no earlier sequence shares a longer prefix with a sequence than its
    # predecessor.
    keys = [ids.astype(">i8").tobytes() for ids in sequences]
    order = np.array(sorted(range(len(keys)), key=keys.__getitem__))
    lengths = np.array([len(ids) for ids in sequences])
    starts, lengths = _start_offsets(lengths)[order], lengths[order]
    # Both sequences of a pair of neighbours have at least this many tokens.
    common = np.minimum(lengths[1:], lengths[:-1])
    differ = joined[_join_ranges(starts[1:], common)] != joined[_join_ranges(starts[:-1], common)]
    prefix = np.where(
        differ, _join_ranges(np.zeros_like(common), common), np.repeat(common, common)
    )
    shared = np.minimum.reduceat(prefix, _start_offsets(common))
    if shared.sum() < _MIN_SAVED * len(joined):
        return None
    computed = np.ones(len(joined), bool)
    computed[_join_ranges(starts[1:], shared)] = False
    inverse = np.cumsum(computed) - 1
    # In order, because a predecessor's prefix may itself be shared.
    for (before, start), count in zip(pairwise(starts.tolist()), shared.tolist(), strict=True):
        if count:
            inverse[start : start + count] = inverse[before : before + count]
    return np.flatnonzero(computed), inverse


def _start_offsets(lengths: Indices) -> Indices:
    return np.cumsum(lengths) - lengths


def _join_ranges(starts: Indices, lengths: Indices) -> Indices:
    """Return the numbers from each start on, `lengths` of them, end to end."""
    return np.arange(lengths.sum()) + np.repeat(starts - _start_offsets(lengths), lengths)
