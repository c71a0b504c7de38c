"""The operations by PyTorch's own operators."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from app.models.attention.choose import load_attention
from app.models.attention.reference import Attention
from app.models.ops.arguments import (
    AddLinear,
    Columns,
    Int8Gemm,
    LayerNorm,
    Linear,
    QuantizedRows,
    QuantizedWeights,
    RmsNorm,
    RotaryEmbedding,
    activate,
)
from app.models.ops.instruction_sets import MAX_INT8

# The least divisor of a row, as in `torch.nn.functional.normalize`.
SHORTEST_ROW = 1e-12
# The steps of a quantized row.
_STEPS = 255
_TINY = 1e-30


class TorchBackend:
    """Runs on every device and in every dtype; implements `app.models.ops.backend.Backend`."""

    name: ClassVar = "torch"

    def __init__(self, attention: str = "sdpa") -> None:
        self.attention = attention
        self.int8_weight_limit = MAX_INT8
        self.attend = self.load_attention(attention)

    def load_attention(self, name: str) -> Attention:
        """The attention of that name, as this backend has it."""
        return load_attention(name)

    def implementations(self, operation: str) -> list[type["TorchBackend"]]:
        """The classes with an implementation of an operation on this machine, the fastest first."""
        bases = (each for each in type(self).__mro__ if issubclass(each, TorchBackend))
        return [each for each in bases if operation in vars(each)]

    def linear(self, layers: Sequence[nn.Linear], activation: str | None = None) -> Linear:
        """Implement `Backend`."""
        weight, bias = join_layers(layers)

        def linear(states: Tensor) -> Tensor:
            return activate(functional.linear(states, weight, bias), activation)

        return linear

    def add_linear(self, layer: nn.Linear) -> AddLinear:
        """Implement `Backend`."""
        linear = self.linear([layer])

        def add_linear(states: Tensor, residual: Tensor) -> Tensor:
            return linear(states).add_(residual)

        return add_linear

    def embed(
        self, indices: tuple[Tensor, Tensor], tables: tuple[Tensor, Tensor], norm: LayerNorm
    ) -> Tensor:
        """Implement `Backend`."""
        states, others = map(functional.embedding, indices, tables)
        return self.add_norm(states, others, norm)

    def add_norm(self, states: Tensor, residual: Tensor, norm: LayerNorm) -> Tensor:
        """Implement `Backend`."""
        return norm(states.add_(residual))

    def rms_norm(self, states: Tensor, norm: RmsNorm) -> Tensor:
        """Implement `Backend`."""
        return norm(states)

    def rotary(self, states: Tensor, norm: RmsNorm, embedding: RotaryEmbedding) -> None:
        """Implement `Backend`."""
        heads = states[:, : len(norm.weight)]
        cosines, sines = embedding.cosines[:, None], embedding.sines[:, None]
        first, second = norm(heads).float().chunk(2, dim=-1)
        rotated = first * cosines - second * sines, second * cosines + first * sines
        heads.copy_(torch.cat(rotated, dim=-1).to(states.dtype))

    def gate(self, states: Tensor) -> Tensor:
        """Implement `Backend`."""
        gate, through = states.chunk(2, dim=-1)
        return functional.silu(gate).mul_(through)

    def unit_rows(
        self, states: Tensor, dtype: torch.dtype, indices: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Implement `Backend`."""
        rows = (states if indices is None else states.index_select(0, indices)).float()
        lengths = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        return (rows / lengths.clamp_min(SHORTEST_ROW)).to(dtype), lengths.squeeze(-1)

    def quantize_rows(self, states: Tensor, columns: Columns) -> QuantizedRows:
        """Implement `Backend`."""
        states = states * columns.factors
        minimum, highest = states.aminmax(dim=1, keepdim=True)
        scale = (highest - minimum) / _STEPS
        steps = states.sub_(minimum).div_(scale.clamp_min(_TINY))
        return QuantizedRows(columns.spread(steps).to(torch.uint8), scale, minimum)

    def int8_gemm(
        self, weights: QuantizedWeights, dtype: torch.dtype, activation: str | None = None
    ) -> Int8Gemm:
        """Implement `Backend`; exact and slow, in float64."""
        exact = weights.values.double().t() * weights.scale.double()

        def gemm(rows: QuantizedRows) -> Tensor:
            product = rows.values.double() @ exact
            # Not a subclass's, which may be for float32 alone.
            return TorchBackend.dequantize(self, product, rows, weights, dtype, activation)

        return gemm

    def dequantize(
        self,
        product: Tensor,
        rows: QuantizedRows,
        weights: QuantizedWeights,
        dtype: torch.dtype,
        activation: str | None,
    ) -> Tensor:
        """What `product` `[T, out]` of values with scaled weights stands for, as of `int8_gemm`.

        It may be overwritten.
        """
        product.mul_(rows.scale).addcmul_(rows.minimum, weights.sums).add_(weights.bias)
        return activate(product, activation).to(dtype)


def join_layers(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weights `[out, in]` and biases one below the other, those of a single layer not copied."""
    weight = _join([layer.weight for layer in layers])
    return weight, None if layers[0].bias is None else _join([layer.bias for layer in layers])


def _join(tensors: list[Tensor]) -> Tensor:
    return (tensors[0] if len(tensors) == 1 else torch.cat(tensors)).detach()
