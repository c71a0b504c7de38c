"""Linear layers in 8 bits for the CPU: weights by output channel, activations by row.

Weights are s8 with one scale for each output channel. Nothing about a row depends on the other rows
of its batch, so a text's vectors do not depend on its company. There are two ways in:

`FromNorm` takes a layer norm's output, given in units of a step that calibration found wide enough
for nearly every row. Bias, activation and scales are within the product. A row that reaches beyond
127 steps is computed again with a step of its own.

`FromAny` takes what may vary widely from row to row, each with its own range in u8, and adds the
product to the residual.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from app.models.linear import ACTIVATIONS

LARGEST = 127.0
# A row is stored behind its levels as two float32 numbers: scale and minimum.
_ROW_ALIGNMENT = 4
_ROWS_MULTIPLE = 32
_ROWS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Weights:
    """`[out, in]` in oneDNN's layout: levels of `scale` `[out]`. `sums` `[out]` are its rows'."""

    levels: Tensor
    scale: Tensor
    zero: Tensor
    sums: Tensor

    def multiply(
        self,
        levels: Tensor,
        scale: Tensor,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        activation: str | None = None,
    ) -> Tensor:
        """`activation(scale x levels x weights + bias)` in `dtype`, for levels `[T, in]`."""
        operation, algorithm = ACTIVATIONS[activation]
        product: Tensor = torch.ops.onednn.qlinear_pointwise.default(
            levels, 1.0, 0, self.levels, scale, self.zero, bias,
            1.0, 0, dtype, operation, [], algorithm,
        )  # fmt: skip
        return product


def can_quantize(width: int) -> bool:
    """Whether an input of that width can be quantized row by row."""
    return width % _ROW_ALIGNMENT == 0


def quantize_weights(layers: Sequence[nn.Linear]) -> Weights:
    """Round the weights of `layers`, one below the other, each output channel to its own scale."""
    # Part by part: large temporary tensors would leave the memory full of holes.
    parts = [part for layer in layers for part in torch.split(layer.weight.detach(), _ROWS_AT_ONCE)]
    scales = [part.float().abs().amax(1).clamp_min(1e-30) / LARGEST for part in parts]
    scale = torch.cat(scales)
    levels = torch.empty(len(scale), parts[0].shape[1], dtype=torch.int8)
    start = 0
    for part, by in zip(parts, scales, strict=True):
        levels[start : start + len(part)] = (part.float() / by[:, None]).round_()
        start += len(part)
    return Weights(
        levels=torch.ops.onednn.qlinear_prepack(levels, None),
        scale=scale,
        zero=torch.zeros(len(scale), dtype=torch.int32),
        sums=scale * levels.sum(1, dtype=torch.int32),
    )


def join_biases(layers: Sequence[nn.Linear]) -> Tensor:
    """A copy, float32: a view would keep the whole file mapped."""
    return torch.cat([layer.bias.detach().float() for layer in layers])


class FromNorm:
    """`[T, in]` float32 in units of `step` to `activation(x W + b)` `[T, out]` in `dtype`."""

    def __init__(
        self,
        layers: Sequence[nn.Linear],
        step: float,
        *,
        activation: str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._weights = quantize_weights(layers)
        self._scale = self._weights.scale * step
        self._bias = join_biases(layers)
        self._activation = activation
        self._dtype = dtype

    def __call__(self, steps: Tensor) -> Tensor:
        """`activation(x W + b)` of `steps`, which is x in units of the step."""
        levels = steps.clamp(-LARGEST, LARGEST).round_().to(torch.int8)
        output = self._weights.multiply(
            levels, self._scale, self._bias, dtype=self._dtype, activation=self._activation
        )
        low, high = torch.aminmax(steps)
        if max(-low, high) > LARGEST + 0.5:
            self._compute_far_rows(steps, output)
        return output

    def _compute_far_rows(self, steps: Tensor, output: Tensor) -> None:
        reach = steps.abs().amax(1)
        rows = (reach > LARGEST + 0.5).nonzero().squeeze(1)
        # oneDNN compiles a kernel for every new number of rows.
        padded = functional.pad(rows, (0, -len(rows) % _ROWS_MULTIPLE), value=int(rows[0]))
        stretch = (reach[padded] / LARGEST)[:, None]
        levels = (steps[padded] / stretch).round_().to(torch.int8)
        product = self._weights.multiply(levels, self._scale)
        exact = torch.addcmul(self._bias, product, stretch)
        output[rows] = _activate(exact, self._activation).to(self._dtype)[: len(rows)]


class FromAny:
    """`[T, in]` float32 and residual `[T, out]` float32 to their sum in units of `step`."""

    def __init__(self, layer: nn.Linear, step: float) -> None:
        self._weights = quantize_weights([layer])
        self._scale = self._weights.scale / step
        self._offsets = torch.stack((self._weights.sums, join_biases([layer]))) / step

    def __call__(self, states: Tensor, residual: Tensor) -> Tensor:
        """`residual + (x W + b) / step`, written over `residual`."""
        # Row by row: levels in u8, then the row's scale and minimum as float32.
        rows = torch.ops.quantized.embedding_bag_byte_prepack(states)
        width = states.shape[1]
        ranges = rows.view(torch.float32)[:, width // _ROW_ALIGNMENT :]
        product = self._weights.multiply(rows[:, :width], self._scale)
        minimum_and_one = functional.pad(ranges[:, 1:], (0, 1), value=1.0)
        return residual.addmm_(minimum_and_one, self._offsets).addcmul_(product, ranges[:, :1])


def _activate(states: Tensor, activation: str | None) -> Tensor:
    operation, algorithm = ACTIVATIONS[activation]
    match operation:
        case "gelu":
            return functional.gelu(states, approximate=algorithm)
        case "relu":
            return states.relu_()
    return states
