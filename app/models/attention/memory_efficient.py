"""Attention by PyTorch's memory-efficient kernel: every CUDA device, in every format."""

import torch
from torch import Tensor

from app.models.attention.varlen import attend_by_length
from app.models.batch.length_classes import LengthClass
from app.models.batch.packing import PackedBatch

# As `CustomMaskType` in PyTorch's kernel.
_NO_MASK, _CAUSAL = 0, 1


def memory_efficient(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedBatch, *, scale: float, causal: bool
) -> Tensor:
    """Implement `Attention`.

    `scaled_dot_product_attention` calls the same kernel; called directly it takes sequences of any
    lengths at once. It has no grouped heads, so these are copied.
    """
    group = query.shape[0] // key.shape[0]
    if group > 1:
        key, value = (each.repeat_interleave(group, dim=0) for each in (key, value))

    def attend(query: Tensor, key: Tensor, value: Tensor, sequences: LengthClass) -> Tensor:
        bounds, longest = sequences.bounds, sequences.longest
        output: Tensor = torch.ops.aten._efficient_attention_forward(  # noqa: SLF001
            query[None], key[None], value[None], None, bounds, bounds, longest, longest, 0.0,
            _CAUSAL if causal else _NO_MASK, False, scale=scale,
        )[0]  # fmt: skip
        return output[0]

    return attend_by_length(attend, (query, key, value), packed)
