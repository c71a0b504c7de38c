"""What CUDA kernels ask of their arguments, which fake tensors do not look at."""

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
_HALF = {torch.float16, torch.bfloat16}
_FREE = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    *("detach", "lift_fresh", "alias", "_unsafe_view", "device"),
}


class CudaMisuseError(AssertionError):
    """What would go wrong, or slowly, on a real device."""


def launches_nothing(func: Any) -> bool:
    """Whether an operator only allocates memory or looks at it in another way."""
    name = func._schema.name.removeprefix("aten::").removeprefix("prim::")
    return func.is_view or name in _FREE


def check_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise `CudaMisuseError` for what the operator's kernel on a GPU refuses or waits for."""
    named = {
        argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)
    } | kwargs
    match func._overloadpacket:
        case aten.mm | aten.addmm | aten.addmm_ | aten.bmm:
            _require(len({each.dtype for each in _tensors(named)}) == 1, "one dtype in a product")
        case aten.native_layer_norm:
            _require(len({each.dtype for each in _tensors(named)}) == 1, "one dtype in a norm")
        case aten.segment_reduce:
            _require(named.get("unsafe", False), "lengths that are not read back (unsafe=True)")
        case aten._flash_attention_forward | aten._flash_attention_forward_no_dropout_inplace:
            _check_flash_attention(**named)
        case aten._efficient_attention_forward:
            _check_efficient_attention(**named)


def _check_flash_attention(query: Tensor, key: Tensor, value: Tensor, **others: Any) -> None:
    """As `mha_varlen_fwd` of FlashAttention 2 in PyTorch."""
    major, _ = torch.cuda.get_device_capability(query.device)
    _require(major >= 8, "compute capability 8.0 or newer")
    states = [query, key, value, *([others["out"]] if "out" in others else [])]
    _require({each.dtype for each in states} in ({each} for each in _HALF), "float16 or bfloat16")
    _require(all(each.dim() == 3 and each.stride(-1) == 1 for each in states), "[T, H, D]")
    _require(query.shape[-1] % 8 == 0 and query.shape[-1] <= 256, "heads of 8 to 256 numbers")
    _require(query.shape[1] % key.shape[1] == 0, "heads of keys that divide those of queries")
    _check_lengths(query, others["cum_seq_q"], others["max_q"])
    _check_lengths(key, others["cum_seq_k"], others["max_k"])


def _check_efficient_attention(query: Tensor, key: Tensor, value: Tensor, **others: Any) -> None:
    """As `_efficient_attention_forward` in PyTorch, whose kernels are those of xFormers."""
    states = [query, key, value]
    _require(len({each.dtype for each in states}) == 1, "equal dtypes")
    major, _ = torch.cuda.get_device_capability(query.device)
    _require(query.dtype is not torch.bfloat16 or major >= 8, "capability 8.0 for bfloat16")
    _require(all(each.dim() == 4 and each.stride(-1) == 1 for each in states), "[1, T, H, D]")
    _require(all(len(each) == 1 for each in states), "one row of tokens")
    _require(
        query.shape[2] == key.shape[2] == value.shape[2], "as many heads of keys as of queries"
    )
    _check_lengths(query[0], others["cu_seqlens_q"], others["max_seqlen_q"])
    _check_lengths(key[0], others["cu_seqlens_k"], others["max_seqlen_k"])


def _check_lengths(states: Tensor, bounds: Tensor, longest: Any) -> None:
    _require(bounds.dtype is torch.int32, "lengths in int32")
    _require(bounds.is_contiguous() and bounds.device == states.device, "lengths on the device")
    _require(type(longest) is int and 0 < longest <= len(states), "the longest length as a number")


def _tensors(named: dict[str, Any]) -> list[Tensor]:
    return [each for each in named.values() if isinstance(each, Tensor)]


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise CudaMisuseError(f"the kernel needs {what}")
