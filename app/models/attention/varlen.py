"""Attention by FlashAttention's kernels for packed sequences: CUDA, half precision."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from app.errors import StartupError
from app.models.attention.reference import Attention, QueryKeyValue
from app.models.batch.length_classes import LengthClass
from app.models.batch.packing import PackedBatch

FLASH_MODULES = {
    "flash_attention_2": ("flash_attn", "the package flash-attn"),
    "flash_attention_3": ("flash_attn_interface", "FlashAttention 3 (flash_attn_interface)"),
}


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedBatch,
    *,
    scale: float,
    causal: bool,
    window: int | None = None,
) -> Tensor:
    """Implement `WindowedAttention` by the kernel of `torch.nn.attention.varlen`.

    Not by that module, which fills a tensor with zeros at every call and takes a second to import.
    """
    left, right = _reach(window, causal=causal)

    def attend(query: Tensor, key: Tensor, value: Tensor, sequences: LengthClass) -> Tensor:
        bounds, longest = sequences.bounds, sequences.longest
        output: Tensor = torch.ops.aten._flash_attention_forward(  # noqa: SLF001
            query, key, value, bounds, bounds, longest, longest, 0.0, causal, False,
            scale=scale, window_size_left=left, window_size_right=right,
        )[0]  # fmt: skip
        return output

    return attend_by_length(attend, (query, key, value), packed)


def _reach(window: int | None, *, causal: bool) -> tuple[int, int]:
    """How many tokens before and after its own a token attends to; -1 is all of them."""
    if window is None:
        return -1, -1
    return window - 1, 0 if causal else window - 1


def load_flash_attention(name: str) -> Attention:
    """The attention of one of `FLASH_MODULES`; raises `StartupError` if it is not installed."""
    module_name, package = FLASH_MODULES[name]
    try:
        kernel = importlib.import_module(module_name).flash_attn_varlen_func
    except ImportError as error:
        raise StartupError(
            f"ATTENTION={name} needs {package}, which is not installed: {error}"
        ) from error
    return partial(_flash_attention, kernel)


def _flash_attention(
    kernel: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedBatch,
    *,
    scale: float,
    causal: bool,
    window: int | None = None,
) -> Tensor:
    reach = _reach(window, causal=causal)

    def attend(query: Tensor, key: Tensor, value: Tensor, sequences: LengthClass) -> Tensor:
        bounds, longest = sequences.bounds, sequences.longest
        output: Tensor | tuple[Tensor, ...] = kernel(
            query, key, value, bounds, bounds, longest, longest,
            softmax_scale=scale, causal=causal, window_size=reach,
        )  # fmt: skip
        # FlashAttention 3 returns the log-sum-exp with it.
        return output[0] if isinstance(output, tuple) else output

    return attend_by_length(attend, (query, key, value), packed)


def attend_by_length(
    attend: Callable[[Tensor, Tensor, Tensor, LengthClass], Tensor],
    states: QueryKeyValue,
    packed: PackedBatch,
) -> Tensor:
    """`[T, H, D]`: call `attend` for each length class, with its tokens `[tokens, H, D]`.

    Query, key and value in `states` are `[H, T, D]`; nothing is copied.
    """
    query, key, value = (each.transpose(0, 1) for each in states)
    outputs = []
    for sequences in packed.length_classes:
        tokens = slice(sequences.start, sequences.stop)
        outputs.append(attend(query[tokens], key[tokens], value[tokens], sequences))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
