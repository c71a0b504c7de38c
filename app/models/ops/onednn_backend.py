"""The operations on a CPU: matrix products by oneDNN, the rest by PyTorch's operators."""

import platform
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from app.models.ops.arguments import (
    ACTIVATIONS,
    Int8Gemm,
    Linear,
    QuantizedRows,
    QuantizedWeights,
)
from app.models.ops.instruction_sets import MAX_INT8, MAX_INT8_IN_PAIRS
from app.models.ops.torch_backend import TorchBackend, join_layers

# Any number of rows runs on weights that were packed for this many.
_PACKED_FOR_ROWS = 256


class OneDnnBackend(TorchBackend):
    """Weights are packed once; bias and activation are computed within the product.

    The operators are those that PyTorch's compiler emits for frozen weights. In float32 PyTorch's
    own product is as fast, and reads the weights where they are.
    """

    name = "onednn"

    def __init__(self, dtype: torch.dtype, attention: str | None = None) -> None:
        matmul_is_faster = dtype is torch.bfloat16 and _is_x86() and not has_fast_sdpa()
        super().__init__(attention or ("matmul" if matmul_is_faster else "sdpa"))
        self._packs = dtype is torch.bfloat16 and can_pack_bfloat16()
        self.int8_weight_limit = MAX_INT8 if sums_bytes_exactly() else MAX_INT8_IN_PAIRS

    def implementations(self, operation: str) -> list[type[TorchBackend]]:
        """As that of `TorchBackend`."""
        found = super().implementations(operation)
        left = operation == "linear" and not self._packs
        return [each for each in found if not left or each is not OneDnnBackend]

    def linear(self, layers: Sequence[nn.Linear], activation: str | None = None) -> Linear:
        """Implement `Backend`."""
        if layers[0].weight.dtype is not torch.bfloat16 or not can_pack_bfloat16():
            return super().linear(layers, activation)
        weight, bias = join_layers(layers)
        operation, algorithm = ACTIVATIONS[activation]
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)  # noqa: SLF001
        compute = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001

        def linear(states: Tensor) -> Tensor:
            product: Tensor = compute(states, packed, bias, operation, [], algorithm)
            return product

        return linear

    def int8_gemm(
        self, weights: QuantizedWeights, dtype: torch.dtype, activation: str | None = None
    ) -> Int8Gemm:
        """Implement `Backend`; a scale for each row takes a pass of its own."""
        weights = replace(weights, values=torch.ops.onednn.qlinear_prepack(weights.values, None))
        zero_points = torch.zeros(len(weights.scale), dtype=torch.int32)

        def gemm(rows: QuantizedRows) -> Tensor:
            product = torch.ops.onednn.qlinear_pointwise.default(
                rows.values, 1.0, 0, weights.values, weights.scale, zero_points, None,
                1.0, 0, torch.float32, "none", [], "",
            )  # fmt: skip
            return self.dequantize(product, rows, weights, dtype, activation)

        return gemm


def sums_bytes_exactly() -> bool:
    """Whether the processor sums products of bytes in 32 bits, and not first in 16."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("amx_int8", "avx512_vnni", "avx_vnni"))


def has_fast_sdpa() -> bool:
    """Whether PyTorch's fused attention in bfloat16 is fast: with AMX, many times as fast."""
    return bool(torch.cpu.get_capabilities().get("amx_bf16"))


def _is_x86() -> bool:
    """Whether this is the architecture on which attention by two products was measured."""
    return platform.machine() in {"x86_64", "AMD64"}


def can_pack_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 on this processor."""
    native = torch.cpu.get_capabilities().get("avx512_bf16", False)
    return bool(native and torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
