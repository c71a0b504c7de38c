"""The operations by PyTorch's own operators."""

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from app.models.attention.dense import Attention
from app.models.attention.packed import load_attention
from app.models.ops.build import MAX_INT8, MAX_INT8_IN_PAIRS

# `[T, in]` to `[T, out]`.
Linear = Callable[[Tensor], Tensor]
# The same and a residual `[T, out]`, which may be overwritten, to their sum.
AddLinear = Callable[[Tensor, Tensor], Tensor]
# oneDNN's names for the activations of transformers: (operation, algorithm).
ACTIVATIONS = {
    None: ("none", ""),
    "gelu": ("gelu", "none"),
    "gelu_new": ("gelu", "tanh"),
    "gelu_pytorch_tanh": ("gelu", "tanh"),
    "relu": ("relu", ""),
}


def activate(states: Tensor, activation: str | None) -> Tensor:
    """One of `ACTIVATIONS`; `states` may be overwritten."""
    operation, algorithm = ACTIVATIONS[activation]
    match operation:
        case "gelu":
            return functional.gelu(states, approximate=algorithm)
        case "relu":
            return states.relu_()
    return states


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Layer normalisation over the last dimension; on a CPU its parameters are always float32."""

    weight: Tensor
    bias: Tensor
    epsilon: float

    def __call__(self, states: Tensor) -> Tensor:
        """In the dtype of `states`."""
        return functional.layer_norm(
            states, self.weight.shape, self.weight, self.bias, self.epsilon
        )


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """Normalisation by the root of the mean square; a weight may be `[heads, width]`."""

    weight: Tensor
    epsilon: float

    def __call__(self, states: Tensor) -> Tensor:
        """Of the last dimension, in the dtype of `states`."""
        return functional.rms_norm(states, self.weight.shape[-1:], None, self.epsilon) * self.weight


@dataclass(frozen=True, slots=True)
class RotaryEmbedding:
    """Rotary position embedding (Su et al. 2021): cosines and sines `[T, width / 2]`, float32."""

    cosines: Tensor
    sines: Tensor

    @classmethod
    def at(cls, positions: Tensor, width: int, theta: float) -> "RotaryEmbedding":
        """Of tokens at `positions` `[T]`, for heads of `width` numbers."""
        pair = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device)
        angles = positions[:, None].float() * (1.0 / theta ** (pair / width))
        return cls(angles.cos(), angles.sin())


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of bytes that a row of `width` channels becomes.

    Each channel is multiplied by one of `factors` `[width]`. The channels `repeated` `[repeats]`
    int32 have further columns behind the others. `offsets` `[width + repeats]` are what truncation
    begins with: those of a channel's k columns are k-ths apart, so that their sum is what k times
    the channel is rounded to.
    """

    factors: Tensor
    repeated: Tensor
    offsets: Tensor

    def spread(self, steps: Tensor) -> Tensor:
        """From `[T, width]` in steps to `[T, width + repeats]`, whole numbers."""
        return torch.cat([steps, steps[:, self.repeated]], 1).add_(self.offsets).floor_()


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """`values` `[T, columns]` u8; each stands for `scale` x value + `minimum`, both `[T, 1]`."""

    values: Tensor
    scale: Tensor
    minimum: Tensor


@dataclass(frozen=True, slots=True)
class QuantizedWeights:
    """`values` `[out, columns]` s8; each stands for `scale` x value, and all else is `[out]`.

    `sums` are those of the scaled values. `bias` is added to the product.
    """

    values: Tensor
    scale: Tensor
    sums: Tensor
    bias: Tensor


# The product of rows with weights: `[T, out]`.
Int8Gemm = Callable[[QuantizedRows], Tensor]


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
