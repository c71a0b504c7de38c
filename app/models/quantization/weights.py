"""Weights in 8 bits, each output channel with a scale of its own, and the product with them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from app.models.ops import native_gemm as native_products
from app.models.ops.linear import ACTIVATIONS
from app.models.ops.native_library import Library, load_without_amx

LARGEST = 127.0
TINY = 1e-30
# Weights rounded at once: larger temporary tensors would leave the memory full of holes.
_AT_ONCE = 2**18


class Weights(Protocol):
    """`[out, in]` in levels; `sums` `[out]` are those of its rows, times their scale."""

    @property
    def sums(self) -> Tensor:
        """`[out]` float32."""

    def multiply(
        self,
        levels: Tensor,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        activation: str | None = None,
    ) -> Tensor:
        """`activation(scale x levels x weights + bias)` in `dtype`, for levels `[T, in]` u8."""


@dataclass(frozen=True, slots=True)
class OneDnnWeights:
    """In the layout of oneDNN, which runs on every processor that has 8-bit products."""

    levels: Tensor
    scale: Tensor
    zero: Tensor
    sums: Tensor

    def multiply(
        self,
        levels: Tensor,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        activation: str | None = None,
    ) -> Tensor:
        """Implement `Weights`."""
        operation, algorithm = ACTIVATIONS[activation]
        product: Tensor = torch.ops.onednn.qlinear_pointwise.default(
            levels, 1.0, 0, self.levels, self.scale, self.zero, bias,
            1.0, 0, dtype, operation, [], algorithm,
        )  # fmt: skip
        return product


@dataclass(frozen=True, slots=True)
class NativeWeights:
    """In the layout of the kernel in C."""

    library: Library
    panels: Tensor
    scale: Tensor
    sums: Tensor
    zeros: Tensor

    def multiply(
        self,
        levels: Tensor,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        activation: str | None = None,
    ) -> Tensor:
        """Implement `Weights`."""
        return native_products.multiply_levels(
            self.library,
            levels,
            self.panels,
            self.scale,
            self.zeros if bias is None else bias,
            dtype=dtype,
            activation=activation,
        )


def quantize_weights(
    layers: Sequence[nn.Linear], unit: Tensor | None = None, activation: str | None = None
) -> Weights:
    """Round the weights of `layers`, one below the other, each output channel to its own scale.

    `unit` `[in]` is that of the input, `activation` what the product will be asked for.
    """
    levels, scale, sums = _round(layers, unit)
    library = load_without_amx()
    if library is not None and native_products.fits(levels.shape, activation):
        panels = native_products.lay_out(levels)
        return NativeWeights(library, panels, scale, sums, torch.zeros_like(scale))
    packed = torch.ops.onednn.qlinear_prepack(levels, None)
    return OneDnnWeights(packed, scale, torch.zeros(len(scale), dtype=torch.int32), sums)


def _round(layers: Sequence[nn.Linear], unit: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Levels `[out, in]` s8, their scale `[out]`, and the sum of each row times its scale."""
    rows = max(1, _AT_ONCE // layers[0].in_features)
    parts = [part for layer in layers for part in torch.split(layer.weight.detach(), rows)]
    levels, scale, sums = zip(*(_round_part(part, unit) for part in parts), strict=True)
    return torch.cat(levels), torch.cat(scale), torch.cat(sums)


def _round_part(weight: Tensor, unit: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    exact = weight.float() if unit is None else weight.float() * unit
    scale = exact.abs().amax(1).clamp_min(TINY) / LARGEST
    levels = exact.div(scale[:, None]).round_()
    # Below 2^24 float32 is exact in whole numbers, and sums them faster than bytes are summed.
    return levels.to(torch.int8), scale, scale * levels.sum(1)
