"""Attention with tokens that no token attends to: ColBERT's expansion of queries.

A query is filled up with mask tokens, which attend to the query's own tokens alone.
"""

from functools import partial

import torch
from torch import Tensor

from app.models.attention.reference import (
    Attention,
    QueryKeyValue,
    WindowedAttention,
    with_window,
)
from app.models.attention.sdpa import attend_padded, fused
from app.models.batch.packing import PackedBatch


def excluding_unattended(attend: Attention) -> Attention:
    """`attend` for the sequences without unattended tokens; the others are padded and masked.

    It takes a window if `attend` does, which the others must not be longer than.
    """
    windowed = with_window(attend)
    return partial(_attend, attend) if windowed is None else partial(_attend_in_window, windowed)


def _attend(
    attend: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedBatch,
    *,
    scale: float,
    causal: bool,
) -> Tensor:
    output = attend(query, key, value, packed, scale=scale, causal=causal)
    return _attend_partly((query, key, value), packed, output, scale=scale, causal=causal)


def _attend_in_window(
    attend: WindowedAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedBatch,
    *,
    scale: float,
    causal: bool,
    window: int | None = None,
) -> Tensor:
    output = attend(query, key, value, packed, scale=scale, causal=causal, window=window)
    return _attend_partly((query, key, value), packed, output, scale=scale, causal=causal)


def _attend_partly(
    states: QueryKeyValue, packed: PackedBatch, output: Tensor, *, scale: float, causal: bool
) -> Tensor:
    """`output` with the right rows of the sequences that end in unattended tokens."""
    padding = packed.partly_attended
    if padding is not None:
        masked = _causal if causal else partial(fused, causal=False)
        attended = output.new_empty(len(padding.tokens), *output.shape[1:])
        attend_padded(masked, states, padding, attended, scale=scale)
        output.index_copy_(0, padding.tokens, attended)
    return output


def _causal(
    states: QueryKeyValue, output: Tensor, *, scale: float, mask: Tensor | None = None
) -> None:
    """Implement `BlockAttention`: no token attends to a later one, nor to one that `mask` hides.

    PyTorch's operator takes a mask or computes causally, not both.
    """
    length = output.shape[2]
    later = torch.full((length, length), -torch.inf, dtype=output.dtype, device=output.device)
    later = later.triu(1)
    fused(states, output, scale=scale, mask=later if mask is None else mask + later, causal=False)
