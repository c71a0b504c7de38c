"""The interface of attention over a packed batch, and the slow reference for every kernel."""

from inspect import signature
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from app.models.batch.packing import PackedBatch

# Query [H, T, D], key and value [Hkv, T, D]; in a block [N, H, L, D] and [N, Hkv, L, D].
QueryKeyValue = tuple[Tensor, Tensor, Tensor]


class Attention(Protocol):
    """Attention within each sequence of a packed batch."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        packed: PackedBatch,
        *,
        scale: float,
        causal: bool,
    ) -> Tensor:
        """`[T, H, D]` of query `[H, T, D]`, key and value `[Hkv, T, D]`; Hkv divides H."""


class WindowedAttention(Attention, Protocol):
    """Attention that can leave out what is far away."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        packed: PackedBatch,
        *,
        scale: float,
        causal: bool,
        window: int | None = None,
    ) -> Tensor:
        """As `Attention`; a token attends to those less than `window` tokens away."""


def with_window(attend: Attention) -> WindowedAttention | None:
    """The same attention, if it takes a window."""
    takes_window = "window" in signature(attend).parameters
    return cast(WindowedAttention, attend) if takes_window else None


def eager(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedBatch, *, scale: float, causal: bool
) -> Tensor:
    """Pad every sequence to the longest; matmul, mask, softmax, matmul."""
    group = query.shape[0] // key.shape[0]
    q = _pad(query, packed).float()
    k = _pad(key, packed).float().repeat_interleave(group, dim=1)
    v = _pad(value, packed).float().repeat_interleave(group, dim=1)
    scores = (q @ k.transpose(-1, -2)) * scale
    scores = scores.masked_fill(~_mask(packed, query.device, causal=causal), -torch.inf)
    padded = scores.softmax(dim=-1) @ v
    rows = [padded[i, :, :length] for i, length in enumerate(packed.lengths)]
    return torch.cat(rows, dim=1).transpose(0, 1).to(query.dtype)


def _pad(states: Tensor, packed: PackedBatch) -> Tensor:
    """`[H, T, D]` to `[N, H, longest, D]`, zeros behind the shorter ones."""
    rows = torch.split(states.transpose(0, 1), packed.lengths)
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True).transpose(1, 2)


def _mask(packed: PackedBatch, device: torch.device, *, causal: bool) -> Tensor:
    """`[N, 1, longest or 1, longest]`: which keys each query may attend to."""
    position = torch.arange(packed.max_length, device=device)
    lengths = torch.tensor(packed.lengths, device=device)
    mask = (position < lengths[:, None])[:, None, None, :]
    return mask & (position <= position[:, None]) if causal else mask
