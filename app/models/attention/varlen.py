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
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415

    def varlen(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        packed: PackedBatch,
        *,
        scale: float,
        causal: bool,
    ) -> Tensor:
        bounds, longest = packed.cu_seqlens, packed.max_length
        output = varlen_attn(
            *_token_major(query, key, value),
            bounds,
            bounds,
            longest,
            longest,
            scale=scale,
            window_size=(-1, 0) if causal else (-1, -1),
            enable_gqa=query.shape[0] != key.shape[0],
        )
        return _without_log_sum_exp(output)

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
        bounds, longest = packed.cu_seqlens, packed.max_length
        states = _token_major(query, key, value)
        output = attend(
            *states, bounds, bounds, longest, longest, softmax_scale=scale, causal=causal
        )
        return _without_log_sum_exp(output)

    return flash_attention


def _token_major(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`[H, T, D]` to the `[T, H, D]` of variable-length kernels, without a copy."""
    return query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)


def _without_log_sum_exp(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The output alone, beside which FlashAttention 3 returns the log-sum-exp."""
    return output[0] if isinstance(output, tuple) else output
