"""Linear layers in 8 bits for the CPU: weights by output channel, activations by row.

Weights are s8 with one scale for each output channel. Nothing about a row depends on the other rows
of its batch, so a text's vectors do not depend on its company. There are two ways in:

`FromNorm` takes a layer norm's output as levels that are not rounded yet, x / unit + `ZERO` with a
unit for each channel, found by calibration: 127 units reach a little beyond what was seen. Bias,
activation and scales are within the product. A row that reaches farther is computed again with
wider units.

`ToNorm` takes what may vary widely from row to row, each with its own range in u8, adds the product
to the residual and normalises the sum.

Activations are u8: without AMX, oneDNN has no fast product of s8 with s8.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from app.models.ops.linear import ACTIVATIONS
from app.models.ops.native_rows import choose_rows
from app.models.ops.norm import Norm
from app.models.ops.row_ops import Ending
from app.models.quantization.weights import LARGEST, TINY, quantize_weights

_MIDDLE = 128
# The level of 0 before rounding: the half makes truncation round to the nearest.
ZERO = _MIDDLE + 0.5
# What lies between them is cut down to within LARGEST of the middle: 1 to 255. The higher one is
# the last float32 below 256.
_LOWEST, _HIGHEST = 1.0, 256 - 2**-16
_ROWS_MULTIPLE = 32
# How much farther than in calibration a row may reach before it is computed apart. On real weights
# 1.5 instead of 1.1 cost 0.0002 of the worst cosine; 1.1 left a third of the products a second run.
_MARGIN = 1.5
# How far the units follow what the channels reach (1), or even out the weights (0).
_SMOOTHING = 0.75


def choose_unit(reach: Tensor, readers: Sequence[nn.Linear]) -> Tensor:
    """`[hidden]`: a unit for each channel, of which it reaches `reach` `[hidden]` at most.

    Channels that reach far have wide units, the more so where the weights that read them are small:
    otherwise the few that reach farthest, which every model has, would leave the others few levels
    (SmoothQuant, Xiao et al. 2023).
    """
    weight = torch.stack([_largest(layer.weight.detach()) for layer in readers]).amax(0)
    reach, weight = reach.float().clamp_min(TINY), weight.float().clamp_min(TINY)
    relative = reach**_SMOOTHING / weight ** (1 - _SMOOTHING)
    return relative * ((reach / relative).max() * _MARGIN / LARGEST)


def _largest(weight: Tensor) -> Tensor:
    """`[in]`: the largest absolute value of each column."""
    # Absolute values of all of them would be a large temporary tensor.
    return torch.maximum(weight.amax(0), -weight.amin(0))


def to_levels(states: Tensor, unit: Tensor) -> Tensor:
    """States `[T, hidden]` as levels, float32 and not rounded yet."""
    return states / unit + ZERO


def as_levels(norm: Norm, unit: Tensor) -> Norm:
    """`norm` with its output in levels."""
    return Norm(norm.weight / unit, norm.bias / unit + ZERO, norm.epsilon)


def join_biases(layers: Sequence[nn.Linear]) -> Tensor:
    """A copy, float32: a view would keep the whole file mapped."""
    return torch.cat([layer.bias.detach().float() for layer in layers])


class FromNorm:
    """Levels `[T, in]` of a norm's output in units `[in]` to `activation(x W + b)` `[T, out]`."""

    def __init__(
        self,
        layers: Sequence[nn.Linear],
        unit: Tensor,
        *,
        activation: str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._weights = quantize_weights(layers, unit, activation)
        self._bias = join_biases(layers)
        self._shifted_bias = self._bias - _MIDDLE * self._weights.sums
        self._activation = activation
        self._dtype = dtype
        self._rows = choose_rows(layers[0].in_features)

    def __call__(self, states: Tensor) -> Tensor:
        """`activation(x W + b)` of `states`, which are levels of x, float32 and not rounded yet."""
        rounded = self._rows.round_levels(states, _LOWEST, _HIGHEST)
        output = self._weights.multiply(
            rounded.levels, self._shifted_bias, dtype=self._dtype, activation=self._activation
        )
        if rounded.far.any():
            self._compute_far_rows(states, output, rounded.far.nonzero().squeeze(1))
        return output

    def _compute_far_rows(self, states: Tensor, output: Tensor, rows: Tensor) -> None:
        # oneDNN compiles a kernel for every new number of rows.
        padded = functional.pad(rows, (0, -len(rows) % _ROWS_MULTIPLE), value=int(rows[0]))
        in_units = states[padded] - ZERO
        wider = in_units.abs().amax(1, keepdim=True) / LARGEST
        levels = (in_units / wider + ZERO).to(torch.uint8)
        product = self._weights.multiply(levels) - _MIDDLE * self._weights.sums
        exact = torch.addcmul(self._bias, product, wider)
        output[rows] = _activate(exact, self._activation).to(self._dtype)[: len(rows)]


class ToNorm:
    """`[T, in]`, and levels `[T, out]` of a residual in units `[out]`, to the norm of their sum."""

    def __init__(self, layer: nn.Linear, unit: Tensor, norm: Norm) -> None:
        self._weights = quantize_weights([layer])
        constant = join_biases([layer]) - ZERO * unit
        self._ending = Ending(self._weights.sums, unit, constant, norm)
        self._rows = choose_rows(layer.in_features, layer.out_features)

    def __call__(self, states: Tensor, residual: Tensor) -> Tensor:
        """`norm(residual + states W + b)`, float32; of the residual its levels are given."""
        rows = self._rows.round_rows(states)
        product = self._weights.multiply(rows.levels)
        return self._rows.norm_product(product, rows, residual, self._ending)

    def ending_in(self, unit: Tensor) -> Self:
        """The same with the norm's output as levels."""
        same = copy(self)
        same._ending = replace(self._ending, norm=as_levels(self._ending.norm, unit))  # noqa: SLF001 - its own
        return same


def _activate(states: Tensor, activation: str | None) -> Tensor:
    operation, algorithm = ACTIVATIONS[activation]
    match operation:
        case "gelu":
            return functional.gelu(states, approximate=algorithm)
        case "relu":
            return states.relu_()
    return states
