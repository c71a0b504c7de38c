"""Attention over a packed batch with a sliding window: by the kernel, or in blocks."""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from app.models.attention.reference import (
    Attention,
    QueryKeyValue,
    WindowedAttention,
    with_window,
)
from app.models.batch.packing import PackedBatch

# Queries at a time, of a sequence that is longer than the window.
_BLOCK = 256


@dataclass(frozen=True, slots=True)
class PackedAttention:
    """Attention in each sequence of `packed`; `attend` is for those no longer than the window."""

    attend: Attention
    packed: PackedBatch
    _short_sequences: dict[int, PackedBatch] = field(default_factory=dict)
    _windowed: WindowedAttention | None = field(init=False)

    def __post_init__(self) -> None:
        """Look at `attend` once for all layers of a forward."""
        object.__setattr__(self, "_windowed", with_window(self.attend))

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        causal: bool,
        window: int | None,
    ) -> Tensor:
        """`[T, H, D]` of query `[H, T, D]`, key and value `[Hkv, T, D]`.

        A token attends to those less than `window` tokens away. Partly attended sequences are
        never longer than the window.
        """
        packed, states = self.packed, (query, key, value)
        if window is None or packed.max_length <= window:
            return self.attend(*states, packed, scale=scale, causal=causal)
        if self._windowed is not None:
            return self._windowed(*states, packed, scale=scale, causal=causal, window=window)
        short = self._no_longer_than(window)
        attended = []
        if short.tokens:
            of_short = _tokens(states, 0, short.tokens)
            attended.append(self.attend(*of_short, short, scale=scale, causal=causal))
        for start, stop in pairwise(packed.offsets[len(short.unpack_order) :].tolist()):
            of_one = _tokens(states, start, stop)
            attended.append(attend_in_window(of_one, scale=scale, causal=causal, window=window))
        return torch.cat(attended)

    def _no_longer_than(self, window: int) -> PackedBatch:
        """The sequences no longer than the window, as a batch; perhaps none."""
        if window not in self._short_sequences:
            packed = self.packed
            count = int(np.argmax(np.diff(packed.offsets) > window))
            tokens = int(packed.offsets[count])
            self._short_sequences[window] = PackedBatch(
                packed.input_ids[:, :tokens],
                packed.position_ids[:, :tokens],
                packed.cu_seqlens[: count + 1],
                packed.offsets[: count + 1],
                np.arange(count),
                partly_attended=packed.partly_attended,
            )
        return self._short_sequences[window]


def _tokens(states: QueryKeyValue, start: int, stop: int) -> QueryKeyValue:
    query, key, value = states
    return query[:, start:stop], key[:, start:stop], value[:, start:stop]


def attend_in_window(states: QueryKeyValue, *, scale: float, causal: bool, window: int) -> Tensor:
    """`[L, H, D]` of one sequence's query `[H, L, D]`, key and value `[Hkv, L, D]`, in blocks."""
    query, key, value = states
    length = query.shape[1]
    blocks = []
    for start in range(0, length, _BLOCK):
        stop = min(length, start + _BLOCK)
        last_key = stop if causal else min(length, stop + window - 1)
        queries, keys = slice(start, stop), slice(max(0, start - window + 1), last_key)
        distances = _positions(queries, query.device)[:, None] - _positions(keys, query.device)
        visible = distances.abs() < window
        blocks.append(
            functional.scaled_dot_product_attention(
                query[None, :, queries],
                key[None, :, keys],
                value[None, :, keys],
                attn_mask=visible & (distances >= 0) if causal else visible,
                scale=scale,
                enable_gqa=query.shape[0] != key.shape[0],
            )[0]
        )
    return torch.cat(blocks, dim=1).transpose(0, 1)


def _positions(tokens: slice, device: torch.device) -> Tensor:
    return torch.arange(tokens.start, tokens.stop, device=device)
