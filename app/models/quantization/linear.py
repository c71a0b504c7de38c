"""Linear layers in 8 bits for the CPU: weights by output channel, activations by row.

Weights are s8 with one scale for each output channel. Nothing about a row depends on the other rows
of its batch, so a text's vectors never depend on the other texts in the batch. Activations are u8,
because without AMX oneDNN has no fast product of s8 with s8; they are quantized in two ways:

`StaticLinear` reads the output of a layer norm with a scale for each channel, chosen once by
calibration. The norm's parameters hold the scale, so that its output only has to be rounded, and
bias, activation and scales are computed within the product. A row with an outlier, beyond the
calibration range, is computed again with larger scales.

`DynamicLinear` reads what may vary widely from row to row: each row gets a scale and a minimum of
its own. It adds the product to the residual and normalises the sum.
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
_OUTLIER_ROWS_MULTIPLE = 32
# How far beyond the calibration range a value may lie before it is an outlier. On real weights 1.5
# instead of 1.1 cost 0.0002 of the worst cosine; with 1.1 a third of the products ran twice.
_MARGIN = 1.5
# How far the scales follow the range of the activations (1), or that of the weights (0).
_SMOOTHING = 0.75
# Weights rounded at once: larger temporary tensors would leave the memory full of holes.
_WEIGHTS_AT_ONCE = 2**18


def choose_input_scale(max_abs: Tensor, readers: Sequence[nn.Linear]) -> Tensor:
    """`[hidden]`: a scale for each channel, of which calibration saw `max_abs` `[hidden]` at most.

    Channels of a wide range have a large scale, the more so where the weights that read them are
    small: otherwise the few with the widest range, which every model has, would leave the others
    few steps (SmoothQuant, Xiao et al. 2023).
    """
    weight = torch.stack([_max_abs_of_columns(layer.weight.detach()) for layer in readers]).amax(0)
    max_abs, weight = max_abs.float().clamp_min(_TINY), weight.float().clamp_min(_TINY)
    relative = max_abs**_SMOOTHING / weight ** (1 - _SMOOTHING)
    return relative * ((max_abs / relative).max() * _MARGIN / MAX_VALUE)


def _max_abs_of_columns(weight: Tensor) -> Tensor:
    # Absolute values of all of them would be a large temporary tensor.
    return torch.maximum(weight.amax(0), -weight.amin(0))


def to_steps(states: Tensor, scale: Tensor) -> Tensor:
    """States `[T, hidden]` in steps of `scale` from the zero point, float32, to be truncated."""
    return states / scale + SHIFT


def norm_to_steps(norm: LayerNorm, scale: Tensor) -> LayerNorm:
    """`norm` with its output as `to_steps` gives it."""
    return LayerNorm(norm.weight / scale, norm.bias / scale + SHIFT, norm.epsilon)


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
    """From a norm's output `[T, in]`, in steps of `scale` `[in]`, to `[T, out]`."""

    def __init__(
        self,
        layers: Sequence[nn.Linear],
        scale: Tensor,
        backend: Backend,
        *,
        activation: str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._weights = QuantizedWeights.of(layers, backend, scale, activation)
        self._bias = _join_biases(layers)
        self._shifted_bias = self._bias - _ZERO_POINT * self._weights.sums
        self._backend = backend
        self._activation = activation
        self._dtype = dtype

    def __call__(self, steps: Tensor) -> Tensor:
        """`activation(x W + b)` in the dtype; `steps` are x as `to_steps` gives it."""
        clamped = self._backend.clamp(steps, _LOWEST, _HIGHEST)
        output = self._weights.gemm(
            clamped.values, self._shifted_bias, dtype=self._dtype, activation=self._activation
        )
        if clamped.outliers.any():
            self._compute_outlier_rows(steps, output, clamped.outliers.nonzero().squeeze(1))
        return output

    def _compute_outlier_rows(self, steps: Tensor, output: Tensor, rows: Tensor) -> None:
        # oneDNN compiles a kernel for every new number of rows.
        padded = functional.pad(rows, (0, -len(rows) % _OUTLIER_ROWS_MULTIPLE), value=int(rows[0]))
        centred = steps[padded] - SHIFT
        scale = centred.abs().amax(1, keepdim=True) / MAX_VALUE
        values = (centred / scale + SHIFT).to(torch.uint8)
        product = self._weights.gemm(values) - _ZERO_POINT * self._weights.sums
        exact = torch.addcmul(self._bias, product, scale)
        output[rows] = activate(exact, self._activation).to(self._dtype)[: len(rows)]


class DynamicLinear:
    """`[T, in]`, and a residual `[T, out]` in steps of `scale` `[out]`, to the norm of the sum."""

    def __init__(self, layer: nn.Linear, scale: Tensor, norm: LayerNorm, backend: Backend) -> None:
        self._weights = QuantizedWeights.of([layer], backend)
        constant = _join_biases([layer]) - SHIFT * scale
        self._epilogue = Epilogue(self._weights.sums, scale, constant, norm)
        self._backend = backend

    def __call__(self, states: Tensor, residual: Tensor) -> Tensor:
        """`norm(residual + states W + b)`, float32; `residual` is as `to_steps` gives it."""
        rows = self._backend.quantize_rows(states)
        product = self._weights.gemm(rows.values)
        return self._backend.dequantize_add_norm(product, rows, residual, self._epilogue)

    def with_output_scale(self, scale: Tensor) -> Self:
        """The same with the norm's output in steps of `scale`."""
        same = copy(self)
        norm = norm_to_steps(self._epilogue.norm, scale)
        same._epilogue = replace(self._epilogue, norm=norm)  # noqa: SLF001 - its own
        return same
