"""Attention by FlashAttention's kernels for packed sequences: CUDA, half precision."""

import importlib

from torch import Tensor

from app.errors import StartupError
from app.models.attention.reference import Attention
from app.models.batch.packing import PackedBatch

FLASH_MODULES = {
    "flash_attention_2": ("flash_attn", "the package flash-attn"),
    "flash_attention_3": ("flash_attn_interface", "FlashAttention 3 (flash_attn_interface)"),
}


def load_varlen() -> Attention:
    """PyTorch's own variable-length attention."""
    # Imported where it is needed: it brings torch._dynamo, a second of every start.
    attend = importlib.import_module("torch.nn.attention.varlen").varlen_attn

    def varlen(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        packed: PackedBatch,
        *,
        scale: float,
        causal: bool,
    ) -> Tensor:
        output: Tensor = attend(
            *_token_major(query, key, value),
            *_sequence_bounds(packed),
            scale=scale,
            window_size=(-1, 0) if causal else (-1, -1),
            enable_gqa=query.shape[0] != key.shape[0],
        )
        return output

    return varlen


def load_flash_attention(name: str) -> Attention:
    """One of `FLASH_MODULES`; raises `StartupError` where its package is not installed."""
    module_name, package = FLASH_MODULES[name]
    try:
        attend = importlib.import_module(module_name).flash_attn_varlen_func
    except ImportError as error:
        raise StartupError(
            f"ATTENTION={name} needs {package}, which is not installed: {error}"
        ) from error

    def flash_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        packed: PackedBatch,
        *,
        scale: float,
        causal: bool,
    ) -> Tensor:
        states = _token_major(query, key, value)
        output = attend(*states, *_sequence_bounds(packed), softmax_scale=scale, causal=causal)
        # FlashAttention 3 returns the log-sum-exp beside the output.
        attended: Tensor = output[0] if isinstance(output, tuple) else output
        return attended

    return flash_attention


def _token_major(*states: Tensor) -> list[Tensor]:
    """`[H, T, D]` to the `[T, H, D]` of variable-length kernels, without a copy."""
    return [each.transpose(0, 1) for each in states]


def _sequence_bounds(packed: PackedBatch) -> tuple[Tensor, Tensor, int, int]:
    """Cumulative lengths and longest sequence, of queries and of keys: here the same."""
    return packed.cu_seqlens, packed.cu_seqlens, packed.max_length, packed.max_length
