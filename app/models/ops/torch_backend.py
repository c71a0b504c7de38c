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
    ClampedValues,
    Epilogue,
    Int8Gemm,
    LayerNorm,
    Linear,
    QuantizedRows,
    RmsNorm,
    RotaryEmbedding,
    activate,
)
from app.models.ops.instruction_sets import MAX_INT8

# PyTorch stores a quantized row with its scale and minimum behind it, as two float32 numbers.
_ROW_ALIGNMENT = 4
# The least divisor of a row, as in `torch.nn.functional.normalize`.
SHORTEST_ROW = 1e-12


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

    def int8_gemm(self, values: Tensor, scale: Tensor, activation: str | None = None) -> Int8Gemm:
        """Implement `Backend`; exact and slow, in float64."""
        del activation  # The product is called with it.
        weight = values.double().t() * scale.double()

        def gemm(
            values: Tensor,
            bias: Tensor | None = None,
            *,
            dtype: torch.dtype = torch.float32,
            activation: str | None = None,
        ) -> Tensor:
            product = values.double() @ weight
            return activate(product if bias is None else product.add_(bias), activation).to(dtype)

        return gemm

    def clamp(self, states: Tensor, lowest: float, highest: float) -> ClampedValues:
        """Implement `Backend`."""
        clamped = states.clamp(lowest, highest)
        return ClampedValues(clamped.to(torch.uint8), (clamped != states).any(1))

    def quantize_rows(self, states: Tensor, factors: Tensor) -> QuantizedRows:
        """Implement `Backend`."""
        rows = torch.ops.quantized.embedding_bag_byte_prepack(states * factors)
        width = states.shape[1]
        ranges = rows.view(torch.float32)[:, width // _ROW_ALIGNMENT :]
        scale, minimum = ranges.split(1, dim=1)
        return QuantizedRows(rows[:, :width], scale, minimum)

    def dequantize_add_norm(
        self, product: Tensor, rows: QuantizedRows, residual: Tensor, epilogue: Epilogue
    ) -> Tensor:
        """Implement `Backend`."""
        # In place: memory that is touched for the first time costs more than a pass over it.
        product.mul_(rows.scale).addcmul_(rows.minimum, epilogue.weight_sums)
        product.addcmul_(residual, epilogue.residual_scale).add_(epilogue.constant)
        return epilogue.norm(product)


def can_quantize(width: int) -> bool:
    """Whether rows of that width can be quantized."""
    return width % _ROW_ALIGNMENT == 0


def join_layers(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weights `[out, in]` and biases one below the other, those of a single layer not copied."""
    weight = _join([layer.weight for layer in layers])
    return weight, None if layers[0].bias is None else _join([layer.bias for layer in layers])


def _join(tensors: list[Tensor]) -> Tensor:
    return (tensors[0] if len(tensors) == 1 else torch.cat(tensors)).detach()
