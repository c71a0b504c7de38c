"""Attention on dense tensors: one block of equal lengths, or of padded short sequences, at a time.

The signature of every attention is here, the plain one for comparison (`eager`), PyTorch's operator
(`sdpa`), and two matrix products with a softmax between them (`matmul`).
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from smart_embedder.models.batch.blocks import Padding
from smart_embedder.models.batch.packing import PackedBatch

# Query [H, T, D], key and value [Hkv, T, D]; in a block [N, H, L, D] and [N, Hkv, L, D].
QueryKeyValue = tuple[Tensor, Tensor, Tensor]
# (states, output, *, scale, mask): attention within a block of N sequences of L tokens. It fills
# `output` [N, H, L, D]; `mask` [N, 1, 1, L] is added to the scores, None adds nothing.
BlockAttention = Callable[..., None]


class Attention(Protocol):
    """Attention within each sequence of a packed batch.

    One that takes `window`, too, lets a token attend to those less than `window` tokens away.
    """

    def __call__(
        self, states: QueryKeyValue, packed: PackedBatch, *, scale: float, causal: bool
    ) -> Tensor:
        """`[T, H, D]` of query `[H, T, D]`, key and value `[Hkv, T, D]`; Hkv divides H."""


def eager(states: QueryKeyValue, packed: PackedBatch, *, scale: float, causal: bool) -> Tensor:
    """Pad every sequence to the longest; matmul, mask, softmax, matmul."""
    query, key, value = states
    group = query.shape[0] // key.shape[0]
    q = _pad_rows(query, packed).float()
    k = _pad_rows(key, packed).float().repeat_interleave(group, dim=1)
    v = _pad_rows(value, packed).float().repeat_interleave(group, dim=1)
    position = torch.arange(packed.max_length, device=query.device)
    lengths = torch.tensor(packed.lengths, device=query.device)
    visible = (position < lengths[:, None])[:, None, None, :]
    if causal:
        visible = visible & (position <= position[:, None])
    scores = (q @ k.transpose(-1, -2)) * scale
    padded = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1) @ v
    rows = [padded[i, :, :length] for i, length in enumerate(packed.lengths)]
    return torch.cat(rows, dim=1).transpose(0, 1).to(query.dtype)


def _pad_rows(states: Tensor, packed: PackedBatch) -> Tensor:
    """`[H, T, D]` to `[N, H, longest, D]`, zeros behind the shorter ones."""
    rows = torch.split(states.transpose(0, 1), packed.lengths)
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True).transpose(1, 2)


def sdpa(states: QueryKeyValue, packed: PackedBatch, *, scale: float, causal: bool) -> Tensor:
    """Implement `Attention`, on every device."""
    return _attend_in_blocks(partial(fused, causal=causal), states, packed, scale=scale)


def fused(
    states: QueryKeyValue, output: Tensor, *, scale: float, mask: Tensor | None, causal: bool
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


def _attend_in_blocks(
    attend: BlockAttention, states: QueryKeyValue, packed: PackedBatch, *, scale: float
) -> Tensor:
    """`[T, H, D]`: call `attend` for each block of `packed`; zeros for tokens that round T up."""
    heads, tokens, _ = states[0].shape
    output = states[0].new_empty(tokens, heads, states[2].shape[2])
    for block in packed.blocks:
        if block.padding is None:
            # Views of sequences of one length, [count, H, length, D].
            query, key, value, dense = (
                each[:, block.start : block.stop]
                .view(len(each), -1, block.length, each.shape[-1])
                .transpose(0, 1)
                for each in (*states, output.transpose(0, 1))
            )
            attend((query, key, value), dense, scale=scale, mask=None)
        else:
            attended = output[block.start : block.stop]
            attend_padded(attend, states, block.padding, attended, scale=scale)
    output[packed.real_tokens :] = 0
    return output


def attend_padded(
    attend: BlockAttention, states: QueryKeyValue, padding: Padding, output: Tensor, *, scale: float
) -> None:
    """Fill `output` `[tokens, H, D]`: call `attend` for copies that are padded and masked."""
    padded = []
    for each in states:
        slots = each.transpose(0, 1).index_select(0, padding.token_of_slot)
        slots = slots.view(padding.count, padding.length, *slots.shape[1:])
        padded.append(slots.transpose(1, 2))
    query, key, value = padded
    attended = query.new_empty(padding.count, padding.length, query.shape[1], value.shape[-1])
    mask = padding.mask.to(query.dtype)
    attend((query, key, value), attended.transpose(1, 2), scale=scale, mask=mask)
    torch.index_select(attended.flatten(0, 1), 0, padding.slots, out=output)


# Scores held at once, 4 MiB of them: they stay in the cache.
_MOST_SCORES = 2**21
# Below this, as for a single query or a small model, PyTorch's one call is faster.
_FEW_SCORES = 2**16
# Fewer queries at once would read all keys and values too often.
_FEWEST_QUERIES = 256


def matmul(states: QueryKeyValue, packed: PackedBatch, *, scale: float, causal: bool) -> Tensor:
    """Implement `Attention`; causal attention and grouped heads are left to PyTorch's operator."""
    if causal or len(states[0]) != len(states[1]):
        return sdpa(states, packed, scale=scale, causal=causal)
    return _attend_in_blocks(attend_by_matmul, states, packed, scale=scale)


def attend_by_matmul(
    states: QueryKeyValue, output: Tensor, *, scale: float, mask: Tensor | None
) -> None:
    """Implement `BlockAttention` for attention that is not causal, without grouped heads."""
    count, heads, length, _ = output.shape
    if count * heads * length * length < _FEW_SCORES:
        fused(states, output, scale=scale, mask=mask, causal=False)
        return
    sequences = max(1, _MOST_SCORES // (heads * length * length))
    for start in range(0, count, sequences):
        chosen = slice(start, start + sequences)
        # Contiguous: the products below are far slower on a view of the projection.
        query = (states[0][chosen] * scale).contiguous()
        key, value = (each[chosen].contiguous() for each in states[1:])
        at_once = max(1, min(heads, _MOST_SCORES // (len(query) * _FEWEST_QUERIES * length)))
        rows = max(1, _MOST_SCORES // (len(query) * at_once * length))
        for head, row in product(range(0, heads, at_once), range(0, length, rows)):
            some, block = slice(head, head + at_once), slice(row, row + rows)
            scores = _multiply(query[:, some, block], key[:, some].transpose(-1, -2))
            if mask is not None:
                scores += mask[chosen]
            output[chosen, some, block] = _multiply(scores.softmax(dim=-1), value[:, some])


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right` for `[N, H, ...]`; `@` itself would copy the keys of a long text."""
    product = torch.bmm(left.flatten(0, 1), right.flatten(0, 1))
    return product.view(*left.shape[:2], *product.shape[1:])
