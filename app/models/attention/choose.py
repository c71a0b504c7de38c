"""Attention over a packed batch: one signature, several kernels, one slow reference.

A kernel takes query `[H, T, D]`, key and value `[Hkv, T, D]` with H a multiple of Hkv, and the
packed batch whose sequence borders attention must not cross; it returns `[T, H, D]`. `eager` is the
reference that the others must agree with.
"""

import importlib
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from app.errors import StartupError
from app.models.attention import matmul as matmul_attention
from app.models.attention import native as native_attention
from app.models.attention.blocks import attend_in_blocks, fused
from app.models.batch.packing import PackedBatch
from app.models.ops.native_library import load_library

_FLASH_MODULES = {
    "flash_attention_2": ("flash_attn", "the package flash-attn"),
    "flash_attention_3": ("flash_attn_interface", "FlashAttention 3 (flash_attn_interface)"),
}


class Kernel(Protocol):
    """One way to compute attention."""

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
        """`[T, H, D]`: every query's mean of the values of its own sequence."""


def choose_attention(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """The kernel that the setting ATTENTION names, of which `auto` is the fastest.

    Raises `StartupError` where it cannot run on `device` in `dtype`.
    """
    chosen = resolve_name(name, device, dtype)
    load_kernel(chosen)
    return chosen


def resolve_name(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """What `auto` means on `device`, and whether a named kernel can run there at all."""
    flash_runs = device.type == "cuda" and dtype in {torch.float16, torch.bfloat16}
    if name == "auto" and not flash_runs:
        return _fastest_elsewhere(device, dtype)
    if name == "auto":
        return "varlen"
    if name in {"varlen", *_FLASH_MODULES} and not flash_runs:
        raise StartupError(
            f"ATTENTION={name} needs an NVIDIA GPU and float16 or bfloat16, but the model runs in "
            f"{str(dtype).removeprefix('torch.')} on {device.type}; set ATTENTION to auto"
        )
    if name == "native" and (device.type != "cpu" or dtype is not torch.bfloat16):
        raise StartupError(
            "ATTENTION=native needs a CPU and DTYPE bfloat16 or int8, but the model runs in "
            f"{str(dtype).removeprefix('torch.')} on {device.type}; set ATTENTION to auto"
        )
    return name


def _fastest_elsewhere(device: torch.device, dtype: torch.dtype) -> str:
    if not matmul_attention.is_faster(device, dtype):
        return "sdpa"
    return "matmul" if load_library() is None else "native"


def eager(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedBatch, *, scale: float, causal: bool
) -> Tensor:
    """The reference: pad every sequence to the longest, mask, matmul, softmax, matmul."""
    group = query.shape[0] // key.shape[0]
    q = _pad(query, packed).float()
    k = _pad(key, packed).float().repeat_interleave(group, dim=1)
    v = _pad(value, packed).float().repeat_interleave(group, dim=1)
    scores = (q @ k.transpose(-1, -2)) * scale
    scores = scores.masked_fill(~_allowed(packed, query.device, causal=causal), -torch.inf)
    padded = scores.softmax(dim=-1) @ v
    rows = [padded[i, :, :length] for i, length in enumerate(packed.lengths)]
    return torch.cat(rows, dim=1).transpose(0, 1).to(query.dtype)


def sdpa(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedBatch, *, scale: float, causal: bool
) -> Tensor:
    """PyTorch's own attention once for each block; runs on every device."""
    attend = partial(fused, causal=causal)
    return attend_in_blocks(attend, (query, key, value), packed, scale=scale)


def matmul(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedBatch, *, scale: float, causal: bool
) -> Tensor:
    """Two products and a softmax for each block; Qwen's attention goes to PyTorch's own."""
    simple = not causal and query.shape[0] == key.shape[0]
    attend = matmul_attention.attend if simple else partial(fused, causal=causal)
    return attend_in_blocks(attend, (query, key, value), packed, scale=scale)


def load_kernel(name: str) -> Kernel:
    """The kernel of that name; raises `StartupError` where its package is not installed."""
    if name == "varlen":
        return _pytorch_varlen()
    if name in _FLASH_MODULES:
        return _flash_attention(name)
    if name == "native":
        return _native()
    kernels: dict[str, Kernel] = {"sdpa": sdpa, "matmul": matmul, "eager": eager}
    return kernels[name]


def _native() -> Kernel:
    """The kernel in C; what does not fit it goes to PyTorch's own."""
    library = load_library()
    if library is None:
        raise StartupError(
            "ATTENTION=native needs the kernels, which are not built, or not for this processor: "
            "python -m app.models.ops.build builds them"
        )

    def native(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        packed: PackedBatch,
        *,
        scale: float,
        causal: bool,
    ) -> Tensor:
        attend = sdpa
        if native_attention.fits(query, key, value):
            attend = partial(native_attention.attend, library)
        return attend(query, key, value, packed, scale=scale, causal=causal)

    return native


def _pytorch_varlen() -> Kernel:
    """PyTorch's own variable-length flash attention (CUDA, half precision)."""
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
            *_borders(packed),
            scale=scale,
            window_size=(-1, 0) if causal else (-1, -1),
            enable_gqa=query.shape[0] != key.shape[0],
        )
        return output

    return varlen


def _flash_attention(name: str) -> Kernel:
    module_name, wanted = _FLASH_MODULES[name]
    try:
        attend = importlib.import_module(module_name).flash_attn_varlen_func
    except ImportError as error:
        raise StartupError(
            f"ATTENTION={name} needs {wanted}, which is not installed: {error}"
        ) from error

    def flash(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        packed: PackedBatch,
        *,
        scale: float,
        causal: bool,
    ) -> Tensor:
        states = _token_major(query, key, value)
        output = attend(*states, *_borders(packed), softmax_scale=scale, causal=causal)
        # FlashAttention 3 returns the log-sum-exp beside the output.
        attended: Tensor = output[0] if isinstance(output, tuple) else output
        return attended

    return flash


def _token_major(*states: Tensor) -> list[Tensor]:
    """`[H, T, D]` to the `[T, H, D]` of variable-length kernels, without a copy."""
    return [each.transpose(0, 1) for each in states]


def _borders(packed: PackedBatch) -> tuple[Tensor, Tensor, int, int]:
    """Borders and longest sequence, of queries and of keys: here the same."""
    return packed.cu_seqlens, packed.cu_seqlens, packed.max_length, packed.max_length


def _pad(states: Tensor, packed: PackedBatch) -> Tensor:
    """`[H, T, D]` to `[N, H, longest, D]`, zeros behind the shorter ones."""
    rows = torch.split(states.transpose(0, 1), packed.lengths)
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True).transpose(1, 2)


def _allowed(packed: PackedBatch, device: torch.device, *, causal: bool) -> Tensor:
    """`[N, 1, longest or 1, longest]`: which keys each query may attend to."""
    place = torch.arange(packed.max_length, device=device)
    lengths = torch.tensor(packed.lengths, device=device)
    allowed = (place < lengths[:, None])[:, None, None, :]
    return allowed & (place <= place[:, None]) if causal else allowed
