"""Attention by the kernel in C: bfloat16 on a CPU with AVX-512 and without AMX.

It multiplies as fast as two products do, and keeps the scores between them in the cache. With AMX
PyTorch's own kernel multiplies many times as fast.
"""

import torch
from torch import Tensor

from app.models.batch.packing import PackedBatch
from app.models.ops.native_library import LANES, Library

# As `WIDEST` in attention.c.
_WIDEST_HEAD = 128


def fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernel can compute this."""
    width = query.shape[-1]
    return (
        query.dtype is torch.bfloat16
        and width % LANES == 0
        and width <= _WIDEST_HEAD
        and query.stride(-1) == key.stride(-1) == 1
        and key.shape == value.shape
        and key.stride() == value.stride()
    )


def attend(
    library: Library,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedBatch,
    *,
    scale: float,
    causal: bool,
) -> Tensor:
    """`[T, H, D]` of query `[H, T, D]`, key and value `[Hkv, T, D]` that fit.

    There are zeros for what rounds T up.
    """
    heads, tokens, width = query.shape
    output = query.new_empty(tokens, heads, width)
    output[packed.asked_tokens :] = 0
    library.run(
        "attend",
        *(each.data_ptr() for each in (query, key, value, output)),
        query.stride(1), query.stride(0), key.stride(1), key.stride(0),
        output.stride(0), output.stride(1),
        packed.offsets.ctypes.data, len(packed.unpack_order),
        heads, heads // len(key), width, scale, causal,
    )  # fmt: skip
    return output
