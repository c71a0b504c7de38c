"""Attention by PyTorch's scaled_dot_product_attention, one block of equal lengths at a time."""

from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from app.models.attention.reference import QueryKeyValue
from app.models.batch.blocks import DenseBlock, PaddedBlock, Padding
from app.models.batch.packing import PackedBatch


class BlockAttention(Protocol):
    """Attention within a block of N sequences of L tokens."""

    def __call__(
        self, states: QueryKeyValue, output: Tensor, *, scale: float, mask: Tensor | None
    ) -> None:
        """Fill `output` `[N, H, L, D]`; `mask` `[N, 1, 1, L]` is added to the scores."""


def sdpa(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedBatch, *, scale: float, causal: bool
) -> Tensor:
    """Implement `Attention`, on every device."""
    attend = partial(fused, causal=causal)
    return attend_in_blocks(attend, (query, key, value), packed, scale=scale)


def fused(
    states: QueryKeyValue, output: Tensor, *, scale: float, mask: Tensor | None = None, causal: bool
) -> None:
    """Implement `BlockAttention` by PyTorch's operator."""
    query, key, value = states
    output[:] = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        # Padding is behind the tokens, where a causal query attends to nothing.
        attn_mask=None if causal else mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def attend_in_blocks(
    attend: BlockAttention, states: QueryKeyValue, packed: PackedBatch, *, scale: float
) -> Tensor:
    """`[T, H, D]`: call `attend` for each block of `packed`; zeros for tokens that round T up."""
    heads, tokens, _ = states[0].shape
    output = states[0].new_empty(tokens, heads, states[2].shape[2])
    for block in packed.blocks:
        attended = output[block.start : block.stop]
        if isinstance(block, PaddedBlock):
            attend_padded(attend, states, block.padding, attended, scale=scale)
        else:
            dense = _block(attended.transpose(0, 1), DenseBlock(0, block.count, block.length))
            query, key, value = (_block(each, block) for each in states)
            attend((query, key, value), dense, scale=scale, mask=None)
    output[packed.real_tokens :] = 0
    return output


def attend_padded(
    attend: BlockAttention, states: QueryKeyValue, padding: Padding, output: Tensor, *, scale: float
) -> None:
    """Fill `output` `[tokens, H, D]`: call `attend` for sequences that are padded and masked."""
    query, key, value = (_pad(each, padding) for each in states)
    padded = query.new_empty(padding.count, padding.length, query.shape[1], value.shape[-1])
    mask = padding.mask.to(query.dtype)
    attend((query, key, value), padded.transpose(1, 2), scale=scale, mask=mask)
    torch.index_select(padded.flatten(0, 1), 0, padding.slots, out=output)


def _block(states: Tensor, block: DenseBlock) -> Tensor:
    """View sequences of one length as `[count, H, length, D]`."""
    tokens = states[:, block.start : block.stop]
    return tokens.view(states.shape[0], block.count, block.length, -1).transpose(0, 1)


def _pad(states: Tensor, padding: Padding) -> Tensor:
    """Copy the sequences of states `[H, T, D]` into `[count, H, length, D]`."""
    slots = states.transpose(0, 1).index_select(0, padding.token_of_slot)
    return slots.view(padding.count, padding.length, *slots.shape[1:]).transpose(1, 2)
