"""Attention over a packed batch with a sliding window."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from app.models.attention.reference import Attention
from app.models.batch.packing import PackedBatch

# Queries at a time, of a sequence that is longer than the window.
_BLOCK = 256


@dataclass(frozen=True, slots=True)
class PackedAttention:
    """Attention in each sequence of `packed`; `attend` is for those no longer than the window."""

    attend: Attention
    packed: PackedBatch
    _short: dict[int, tuple[PackedBatch, int]] = field(default_factory=dict)

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
        packed = self.packed
        if window is None or packed.max_length <= window:
            return self.attend(query, key, value, packed, scale=scale, causal=causal)
        short, count = self._shorter_than(window)
        parts = []
        if count:
            head = slice(0, short.tokens)
            states = query[:, head], key[:, head], value[:, head]
            parts.append(self.attend(*states, packed=short, scale=scale, causal=causal))
        for start, length in zip(packed.offsets[count:], packed.lengths[count:], strict=False):
            rows = slice(int(start), int(start) + length)
            one = (query[:, rows], key[:, rows], value[:, rows])
            parts.append(attend_near(one, scale=scale, causal=causal, window=window))
        return torch.cat(parts)

    def _shorter_than(self, window: int) -> tuple[PackedBatch, int]:
        """The sequences no longer than the window, as a batch, and their number."""
        if window not in self._short:
            packed = self.packed
            longer = np.flatnonzero(np.diff(packed.offsets) > window)
            count = int(longer[0])
            tokens = int(packed.offsets[count])
            short = PackedBatch(
                packed.input_ids[:, :tokens],
                packed.position_ids[:, :tokens],
                packed.cu_seqlens[: count + 1],
                packed.offsets[: count + 1],
                np.arange(count),
                partly_attended=packed.partly_attended,
            )
            self._short[window] = short, count
        return self._short[window]


def attend_near(
    states: tuple[Tensor, Tensor, Tensor], *, scale: float, causal: bool, window: int
) -> Tensor:
    """`[L, H, D]` of one sequence's query `[H, L, D]`, key and value `[Hkv, L, D]`, in blocks."""
    query, key, value = states
    length = query.shape[1]
    made = []
    for start in range(0, length, _BLOCK):
        stop = min(length, start + _BLOCK)
        keys = slice(max(0, start - window + 1), stop if causal else min(length, stop + window - 1))
        distance = (
            torch.arange(start, stop, device=query.device)[:, None]
            - torch.arange(keys.start, keys.stop, device=query.device)[None]
        )
        seen = distance.abs() < window
        if causal:
            seen &= distance >= 0
        made.append(
            functional.scaled_dot_product_attention(
                query[None, :, start:stop],
                key[None, :, keys],
                value[None, :, keys],
                attn_mask=seen,
                scale=scale,
                enable_gqa=query.shape[0] != key.shape[0],
            )[0]
        )
    return torch.cat(made, dim=1).transpose(0, 1)
