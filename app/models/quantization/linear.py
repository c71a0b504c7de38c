"""Linear layers in 8 bits for the CPU: weights by output channel, activations by row.

Weights are s8 with one scale for each output channel. Nothing about a row depends on the other rows
of its batch, so a text's vectors never depend on the other texts in the batch. Activations are u8,
because without AMX oneDNN has no fast product of s8 with s8; they are quantized in two ways:

`StaticLinear` reads the output of a layer norm with a scale and a centre for each channel, chosen
once by calibration. The norm's parameters hold them, so that its output only has to be rounded, and
bias, activation and scales are computed within the product. A row with an outlier, beyond the
calibration range, is computed again with larger scales.

`DynamicLinear` reads what may vary widely from row to row: each row gets a scale and a minimum of
its own, after each channel was divided by its usual size, which the weights are multiplied with. It
adds the product to the residual and normalises the sum.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from app.models.ops.arguments import Epilogue, Int8Gemm, LayerNorm, activate
from app.models.ops.backend import Backend

MAX_VALUE = 127.0
_ZERO_POINT = 128
# What a norm adds to its scaled output: the half makes truncation round to the nearest.
SHIFT = _ZERO_POINT + 0.5
# Between them truncation gives 1 to 255: at most MAX_VALUE from the zero point. The higher one is
# the last float32 below 256.
_LOWEST, _HIGHEST = 1.0, 256 - 2**-16
_TINY = 1e-30
# oneDNN compiles a kernel for every new number of rows: a power of two up to this, then a multiple.
_OUTLIER_ROWS_MULTIPLE = 32
# How far beyond the calibration range a value may lie before it is an outlier. With 1.25 the worst
# cosine on the demo's weights is 0.9972, not 0.9967, and rows of half of the products run twice.
_MARGIN = 1.5
# How far the scales follow the activations (1), or the weights (0).
_SMOOTHING = 0.75
# The same where each row has a scale of its own, and the least size of a channel's activations, as
# a share of the largest: calibration texts may not have used it at all.
_ROW_SMOOTHING = 0.55
_LEAST_SIZE = 1e-3
# Weights rounded at once: larger temporary tensors would leave the memory full of holes.
_WEIGHTS_AT_ONCE = 2**18


@dataclass(frozen=True, slots=True)
class Steps:
    """For each channel of states the size of a step and what the zero point stands for, `[hidden]`.

    A centre costs nothing: norms and biases hold it. Channels of the widest range are often far
    from zero in every text, and it halves their range.
    """

    scale: Tensor
    centre: Tensor

    @classmethod
    def choose(cls, states: Tensor, readers: Sequence[nn.Linear]) -> Self:
        """For states like `[T, hidden]`, those of calibration.

        Channels of a wide range have a large scale, the more so where the weights that read them
        are small: otherwise the few with the widest range, which every model has, would leave the
        others few steps (SmoothQuant, Xiao et al. 2023).
        """
        lowest, highest = states.float().amin(0), states.float().amax(0)
        size = ((highest - lowest) / 2).clamp_min(_TINY)
        relative = size**_SMOOTHING / _size_of_weights(readers) ** (1 - _SMOOTHING)
        scale = relative * ((size / relative).max() * _MARGIN / MAX_VALUE)
        return cls(scale, (lowest + highest) / 2)

    def take(self, states: Tensor) -> Tensor:
        """States `[T, hidden]` in steps from the zero point, float32, to be truncated."""
        return (states - self.centre) / self.scale + SHIFT

    def taken_by(self, norm: LayerNorm) -> LayerNorm:
        """`norm` with its output as `take` gives it."""
        bias = (norm.bias - self.centre) / self.scale + SHIFT
        return LayerNorm(norm.weight / self.scale, bias, norm.epsilon)


def choose_factors(states: Tensor, reader: nn.Linear) -> Tensor:
    """`[in]`: what each channel of states like `[T, in]` is divided by before a row is rounded.

    Without it a few large channels would leave the others of their row few steps.
    """
    size = states.float().square().mean(0).sqrt()
    size = size.clamp_min(_LEAST_SIZE * float(size.max())).clamp_min(_TINY)
    return size**_ROW_SMOOTHING / _size_of_weights([reader]) ** (1 - _ROW_SMOOTHING)


def _size_of_weights(readers: Sequence[nn.Linear]) -> Tensor:
    """`[in]`: the largest weight that reads each channel."""
    sizes = [_max_abs_of_columns(layer.weight.detach()) for layer in readers]
    return torch.stack(sizes).amax(0).float().clamp_min(_TINY)


def _max_abs_of_columns(weight: Tensor) -> Tensor:
    # Absolute values of all of them would be a large temporary tensor.
    return torch.maximum(weight.amax(0), -weight.amin(0))


@dataclass(frozen=True, slots=True)
class QuantizedWeights:
    """The product with weights `[out, in]` in s8; `sums` `[out]` are those of its rows, scaled."""

    gemm: Int8Gemm
    sums: Tensor

    @classmethod
    def of(
        cls,
        layers: Sequence[nn.Linear],
        backend: Backend,
        input_scale: Tensor | None = None,
        activation: str | None = None,
    ) -> Self:
        """Round the weights of `layers`, one below the other; each row has a scale of its own.

        `input_scale` `[in]` is multiplied in; `activation` is what the product will be asked for.
        """
        rows = max(1, _WEIGHTS_AT_ONCE // layers[0].in_features)
        blocks = [block for layer in layers for block in torch.split(layer.weight.detach(), rows)]
        limit = backend.int8_weight_limit
        values, scale, sums = zip(
            *(_quantize(block, limit, input_scale) for block in blocks), strict=True
        )
        gemm = backend.int8_gemm(torch.cat(values), torch.cat(scale), activation)
        return cls(gemm, torch.cat(sums))


def _quantize(
    weight: Tensor, limit: int, input_scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Values `[out, in]` s8 to `limit`, their scale `[out]`, and the rows' sums times it."""
    exact = weight.float() if input_scale is None else weight.float() * input_scale
    scale = exact.abs().amax(1).clamp_min(_TINY) / limit
    values = exact.div(scale[:, None]).round_()
    # Below 2^24 float32 is exact in whole numbers, and sums them faster than bytes are summed.
    return values.to(torch.int8), scale, scale * values.sum(1)


def _join_biases(layers: Sequence[nn.Linear]) -> Tensor:
    return torch.cat([layer.bias.detach().float() for layer in layers])


class StaticLinear:
    """From a norm's output `[T, in]`, in `steps`, to `[T, out]`."""

    def __init__(
        self,
        layers: Sequence[nn.Linear],
        steps: Steps,
        backend: Backend,
        *,
        activation: str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._weights = QuantizedWeights.of(layers, backend, steps.scale, activation)
        self._bias = _join_biases(layers)
        self._bias += torch.cat([layer.weight.detach().float() @ steps.centre for layer in layers])
        self._shifted_bias = self._bias - _ZERO_POINT * self._weights.sums
        self._backend = backend
        self._activation = activation
        self._dtype = dtype

    def __call__(self, steps: Tensor) -> Tensor:
        """`activation(x W + b)` in the dtype; `steps` are x as `Steps.take` gives it."""
        clamped = self._backend.clamp(steps, _LOWEST, _HIGHEST)
        output = self._weights.gemm(
            clamped.values, self._shifted_bias, dtype=self._dtype, activation=self._activation
        )
        if clamped.outliers.any():
            self._compute_outlier_rows(steps, output, clamped.outliers.nonzero().squeeze(1))
        return output

    def _compute_outlier_rows(self, steps: Tensor, output: Tensor, rows: Tensor) -> None:
        multiple = min(_OUTLIER_ROWS_MULTIPLE, 1 << (len(rows) - 1).bit_length())
        padded = functional.pad(rows, (0, -len(rows) % multiple), value=int(rows[0]))
        centred = steps[padded] - SHIFT
        scale = centred.abs().amax(1, keepdim=True) / MAX_VALUE
        values = (centred / scale + SHIFT).to(torch.uint8)
        product = self._weights.gemm(values) - _ZERO_POINT * self._weights.sums
        exact = torch.addcmul(self._bias, product, scale)
        output[rows] = activate(exact, self._activation).to(self._dtype)[: len(rows)]


class DynamicLinear:
    """`[T, in]`, and a residual `[T, out]` in `steps`, to the norm of the sum.

    `factors` `[in]` are those of `choose_factors`.
    """

    def __init__(
        self, layer: nn.Linear, factors: Tensor, steps: Steps, norm: LayerNorm, backend: Backend
    ) -> None:
        self._weights = QuantizedWeights.of([layer], backend, factors)
        constant = _join_biases([layer]) - SHIFT * steps.scale + steps.centre
        self._epilogue = Epilogue(self._weights.sums, steps.scale, constant, norm)
        self._inverse_factors = 1 / factors
        self._backend = backend

    def __call__(self, states: Tensor, residual: Tensor) -> Tensor:
        """`norm(residual + states W + b)`, float32; `residual` is as `Steps.take` gives it."""
        rows = self._backend.quantize_rows(states, self._inverse_factors)
        product = self._weights.gemm(rows.values)
        return self._backend.dequantize_add_norm(product, rows, residual, self._epilogue)

    def with_output_in(self, steps: Steps) -> Self:
        """The same with the norm's output in `steps`."""
        same = copy(self)
        norm = steps.taken_by(self._epilogue.norm)
        same._epilogue = replace(self._epilogue, norm=norm)  # noqa: SLF001 - its own
        return same
