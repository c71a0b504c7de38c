"""Selects the tokens of a packed batch that a head reads, those of some of the sequences."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from app.models.batch.arrays import Indices, to_device
from app.models.batch.packing import PackedBatch

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
