"""The operations of a model's layers: one table of them, and their implementations by libraries.

PyTorch's operators compute every operation on every device and are the reference in tests; oneDNN,
and the kernels in `native` and `cuda`, add what they compute faster with `Backend.prefer`. No row
of a result depends on the other rows of its batch.
"""

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from smart_embedder.kernels.attention import Attention, eager, matmul, sdpa
from smart_embedder.kernels.build import MAX_INT8, MAX_INT8_IN_PAIRS

# The name of the kernels in C.
NATIVE = "native"
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
    "silu": ("swish", ""),
}


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

    @classmethod
    def identity(cls, heads: int, like: Tensor) -> "RmsNorm":
        """One that changes no head `[width]` like `like`, for heads that are rotated alone.

        Beside its epsilon the squares of all states vanish, and products with powers of two are
        exact. In float16 there are no such powers.
        """
        return cls(torch.full((heads, len(like)), 2.0**50).to(like), 2.0**100)

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


# Rows `[T, width]` in float8 (e4m3), and what each is multiplied with, `[T, 1]` float32.
Float8Rows = tuple[Tensor, Tensor]

# The product of rows with weights: `[T, out]`.
Int8Gemm = Callable[[QuantizedRows], Tensor]


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """From `[T, in]` to `activation(x W + b)` `[T, out]`, by products of bytes."""

    columns: Columns
    gemm: Int8Gemm
    backend: "Backend"

    def __call__(self, states: Tensor) -> Tensor:
        """Implement `Linear`."""
        return self.gemm(self.backend.quantize_rows(states, self.columns))


@dataclass(frozen=True, slots=True)
class EncoderParts:
    """A layer of BERT's kind: attention and feed-forward, with a norm after each.

    Its `backend` computes what is between the products.
    """

    backend: "Backend"
    heads: int
    to_query_key_value: Linear
    from_attended: Linear
    attention_norm: LayerNorm
    to_inner: Linear
    from_inner: Linear
    output_norm: LayerNorm


@dataclass(frozen=True, slots=True, eq=False)
class Backend:
    """A table of implementations, and one of them for each operation: a call for each field.

    `table` has the implementations of each operation by their names, the fastest first.
    `int8_weight_limit` is the largest absolute value of a weight for which `int8_gemm` is exact.
    `kernels` tells the instructions and the sources of the kernels in C, where there are any.
    """

    # (layers, activation=None): prepares `activation(x W + b)` of layers that read the same x, side
    # by side.
    linear: Callable[..., Linear]
    # Prepares the sum of `x W` and a residual, which may be overwritten.
    add_linear: Callable[[nn.Linear], AddLinear]
    # (indices, tables, norm): the norm of the sum of rows of two tables, `[T, width]`; their
    # indices are int64.
    embed: Callable[[tuple[Tensor, Tensor], tuple[Tensor, Tensor], LayerNorm], Tensor]
    # (states, residual, norm): the norm of the sum of two `[T, width]`; the states may be
    # overwritten.
    add_norm: Callable[[Tensor, Tensor, LayerNorm], Tensor]
    # The norm of `[T, width]`.
    rms_norm: Callable[[Tensor, RmsNorm], Tensor]
    # Normalises and rotates, in place, the heads of `[T, H, width]` that the norm has weights for.
    # Those come first. A rotated pair has one number in each half of a head.
    rotary: Callable[[Tensor, RmsNorm, RotaryEmbedding], None]
    # (states, activation): `activation(x) y` of the halves x and y of `[T, 2 width]`, which may be
    # overwritten: `[T, width]`.
    gate: Callable[[Tensor, str], Tensor]
    # (states, dtype, indices=None): rows of `[T, width]` divided by their lengths, in `dtype`, and
    # the lengths, float32. The `indices` int64 are the rows that are taken; None takes all.
    unit_rows: Callable[..., tuple[Tensor, Tensor]]
    # Quantizes each row of `[T, width]`, float32 or bfloat16, to 255 steps of its own range.
    quantize_rows: Callable[[Tensor, Columns], QuantizedRows]
    # (weights, dtype, activation=None): prepares `activation(rows x weights + bias)` in `dtype`.
    int8_gemm: Callable[..., Int8Gemm]
    # (states, activation=None): rounds each row of `activation(states)`, `[T, width]`, to float8,
    # so that its largest number is the largest there. The states may be overwritten.
    float8_rows: Callable[..., Float8Rows]
    # (rows, weights, bias, dtype): the product of rows with weights `[out, width]`, `[T, out]`.
    float8_product: Callable[[Float8Rows, Float8Rows, Tensor | None, torch.dtype], Tensor]
    attention: Attention
    # Prepares a layer as single calls, a `native.NativeEncoderLayer`; None where there are none.
    encoder_layer: Callable[[EncoderParts], Any]
    table: dict[str, dict[str, Callable[..., Any]]]
    int8_weight_limit: int = MAX_INT8
    kernels: str = ""

    def prefer(self, name: str, **implementations: Any) -> "Backend":
        """A copy whose fastest implementations of some operations are these, of that name."""
        table = {
            operation: {name: fastest} | self.table[operation] | {name: fastest}
            for operation, fastest in implementations.items()
        }
        return replace(self, table={**self.table, **table}, **implementations)

    def fastest(self, operation: str) -> str:
        """The name of the fastest implementation of an operation."""
        return next(iter(self.table[operation]))

    def select(self, operation: str, name: str) -> "Backend":
        """A copy with the implementation of that name for an operation."""
        chosen: dict[str, Any] = {operation: self.table[operation][name]}
        return replace(self, **chosen)


def torch_backend() -> Backend:
    """PyTorch's operators, which run on every device and in every dtype."""
    operators: dict[str, Any] = {
        "linear": linear,
        "add_linear": make_add_linear(linear),
        "embed": embed,
        "add_norm": add_norm,
        "rms_norm": rms_norm,
        "rotary": rotary,
        "gate": gate,
        "unit_rows": unit_rows,
        "quantize_rows": quantize_rows,
        "int8_gemm": int8_gemm,
        "float8_rows": float8_rows,
        "float8_product": float8_product,
    }
    table = {operation: {"torch": each} for operation, each in operators.items()}
    table["attention"] = {"sdpa": sdpa, "eager": eager}
    return Backend(**operators, attention=sdpa, encoder_layer=lambda _: None, table=table)


def unprepared_backend() -> Backend:
    """The same, but that layers are computed as they are, one by one: nothing is made of them."""

    def multiply(layers: Sequence[nn.Linear], activation: str | None = None) -> Linear:
        return lambda states: activate(torch.cat([each(states) for each in layers], 1), activation)

    return torch_backend().prefer("torch", linear=multiply, add_linear=make_add_linear(multiply))


# The least divisor of a row, as in `torch.nn.functional.normalize`.
SHORTEST_ROW = 1e-12
# The steps of a quantized row.
_STEPS = 255
_TINY = 1e-30
# The largest number of float8 (e4m3).
MAX_FLOAT8 = 448.0


def linear(layers: Sequence[nn.Linear], activation: str | None = None) -> Linear:
    """`Backend.linear` by PyTorch."""
    weight, bias = join_layers(layers)
    return lambda states: activate(functional.linear(states, weight, bias), activation)


def make_add_linear(linear: Callable[..., Linear]) -> Callable[[nn.Linear], AddLinear]:
    """`Backend.add_linear` by an implementation of `Backend.linear`."""

    def add_linear(layer: nn.Linear) -> AddLinear:
        multiply = linear([layer])
        return lambda states, residual: multiply(states).add_(residual)

    return add_linear


def embed(indices: tuple[Tensor, Tensor], tables: tuple[Tensor, Tensor], norm: LayerNorm) -> Tensor:
    """`Backend.embed` by PyTorch."""
    states, others = map(functional.embedding, indices, tables)
    return add_norm(states, others, norm)


def add_norm(states: Tensor, residual: Tensor, norm: LayerNorm) -> Tensor:
    """`Backend.add_norm` by PyTorch."""
    return norm(states.add_(residual))


def rms_norm(states: Tensor, norm: RmsNorm) -> Tensor:
    """`Backend.rms_norm` by PyTorch."""
    return norm(states)


def rotary(states: Tensor, norm: RmsNorm, embedding: RotaryEmbedding) -> None:
    """`Backend.rotary` by PyTorch."""
    heads = states[:, : len(norm.weight)]
    cosines, sines = embedding.cosines[:, None], embedding.sines[:, None]
    first, second = norm(heads).float().chunk(2, dim=-1)
    rotated = first * cosines - second * sines, second * cosines + first * sines
    heads.copy_(torch.cat(rotated, dim=-1).to(states.dtype))


def gate(states: Tensor, activation: str) -> Tensor:
    """`Backend.gate` by PyTorch."""
    opened, through = states.chunk(2, dim=-1)
    return activate(opened, activation).mul(through)


def unit_rows(
    states: Tensor, dtype: torch.dtype, indices: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`Backend.unit_rows` by PyTorch."""
    rows = (states if indices is None else states.index_select(0, indices)).float()
    lengths = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return (rows / lengths.clamp_min(SHORTEST_ROW)).to(dtype), lengths.squeeze(-1)


def quantize_rows(states: Tensor, columns: Columns) -> QuantizedRows:
    """`Backend.quantize_rows` by PyTorch."""
    states = states * columns.factors
    minimum, highest = states.aminmax(dim=1, keepdim=True)
    scale = (highest - minimum) / _STEPS
    steps = states.sub_(minimum).div_(scale.clamp_min(_TINY))
    return QuantizedRows(columns.spread(steps).to(torch.uint8), scale, minimum)


def int8_gemm(
    weights: QuantizedWeights, dtype: torch.dtype, activation: str | None = None
) -> Int8Gemm:
    """`Backend.int8_gemm` by PyTorch; exact and slow, in float64."""
    exact = weights.values.double().t() * weights.scale.double()
    return lambda rows: dequantize(rows.values.double() @ exact, rows, weights, dtype, activation)


def dequantize(
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


def float8_rows(states: Tensor, activation: str | None = None) -> Float8Rows:
    """`Backend.float8_rows` by PyTorch."""
    numbers = activate(states.float(), activation)
    most = numbers.abs().amax(1, keepdim=True).clamp_min(_TINY)
    # Divided by a number from the host, PyTorch would multiply with its reciprocal on a GPU.
    largest = torch.full_like(most, MAX_FLOAT8)
    steps = (numbers * (largest / most)).clamp(-MAX_FLOAT8, MAX_FLOAT8)
    return steps.to(torch.float8_e4m3fn), most / largest


def float8_product(
    rows: Float8Rows, weights: Float8Rows, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`Backend.float8_product` by PyTorch; slow, in float32."""
    own, others = (values.float() * scales for values, scales in (rows, weights))
    return functional.linear(own, others, None if bias is None else bias.float()).to(dtype)


def float8_backend(backend: Backend, dtype: torch.dtype) -> Backend:
    """`backend`, whose products are computed in float8, with results in `dtype`.

    One with an activation has rows in float8 as its result, which the next product reads: the
    activation is computed as they are rounded.
    """

    def linear(layers: Sequence[nn.Linear], activation: str | None = None) -> Linear:
        weight, bias = join_layers(layers)
        weights = backend.float8_rows(weight)

        def multiply(states: Any) -> Any:
            rows = backend.float8_rows(states) if isinstance(states, Tensor) else states
            product = backend.float8_product(rows, weights, bias, dtype)
            return product if activation is None else backend.float8_rows(product, activation)

        return multiply

    return backend.prefer("float8", linear=linear, add_linear=make_add_linear(linear))


def activate(states: Tensor, activation: str | None) -> Tensor:
    """One of `ACTIVATIONS`; `states` may be overwritten."""
    operation, algorithm = ACTIVATIONS[activation]
    match operation:
        case "gelu":
            return functional.gelu(states, approximate=algorithm)
        case "relu":
            return states.relu_()
        case "swish":
            return functional.silu(states)
    return states


def join_layers(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weights `[out, in]` and biases one below the other, those of a single layer not copied."""
    weights = [layer.weight.detach() for layer in layers]
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    if len(layers) == 1:
        return weights[0], biases[0] if biases else None
    return torch.cat(weights), torch.cat(biases) if biases else None


# Any number of rows runs on weights that were packed for this many.
_PACKED_FOR_ROWS = 256


def onednn_backend(dtype: torch.dtype, dequantize: Callable[..., Tensor] = dequantize) -> Backend:
    """PyTorch's operators, and oneDNN's matrix products on a CPU.

    Weights are packed once; bias and activation are computed within the product. The operators are
    those that PyTorch's compiler emits for frozen weights. In float32 PyTorch's own product is as
    fast, and reads the weights where they are. A scale for each row of bytes takes a pass of its
    own, which is `dequantize`.
    """

    def int8_gemm(
        weights: QuantizedWeights, dtype: torch.dtype, activation: str | None = None
    ) -> Int8Gemm:
        packed = torch.ops.onednn.qlinear_prepack(weights.values, None)
        zero_points = torch.zeros(len(weights.scale), dtype=torch.int32)

        def gemm(rows: QuantizedRows) -> Tensor:
            product = torch.ops.onednn.qlinear_pointwise.default(
                rows.values, 1.0, 0, packed, weights.scale, zero_points, None,
                1.0, 0, torch.float32, "none", [], "",
            )  # fmt: skip
            return dequantize(product, rows, weights, dtype, activation)

        return gemm

    backend, has = torch_backend().prefer("onednn", int8_gemm=int8_gemm), cpu_features()
    if dtype is torch.bfloat16:
        available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        if available and "avx512_bf16" in has:
            multiply = _linear_by_onednn
            backend = backend.prefer(
                "onednn", linear=multiply, add_linear=make_add_linear(multiply)
            )
        # Two products were measured on this architecture; with AMX PyTorch's attention is faster.
        if platform.machine() in {"x86_64", "AMD64"} and "amx_bf16" not in has:
            backend = backend.prefer("matmul", attention=matmul)
    # Whether the processor sums products of bytes in 32 bits, and not first in 16.
    exact = has & {"amx_int8", "avx512_vnni", "avx_vnni"}
    return replace(backend, int8_weight_limit=MAX_INT8 if exact else MAX_INT8_IN_PAIRS)


def _linear_by_onednn(layers: Sequence[nn.Linear], activation: str | None = None) -> Linear:
    """`Backend.linear`; layers in float32 are left to PyTorch."""
    if layers[0].weight.dtype is not torch.bfloat16:
        return linear(layers, activation)
    weight, bias = join_layers(layers)
    # oneDNN's ReLU turns NaN into 0: PyTorch's follows the product instead.
    fused, separate = (None, "relu") if activation == "relu" else (activation, None)
    operation, algorithm = ACTIVATIONS[fused]
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)  # noqa: SLF001
    compute = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001

    def multiply(states: Tensor) -> Tensor:
        product: Tensor = compute(states, packed, bias, operation, [], algorithm)
        return activate(product, separate)

    return multiply


def cpu_features() -> set[str]:
    """What the processor can do, by PyTorch's names."""
    return {name for name, has in torch.cpu.get_capabilities().items() if has is True}


def make_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear layer with these tensors, which are not copied."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    linear.load_state_dict(parameter_dict(weight, bias), assign=True)
    return linear


def parameter_dict(weight: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
    """The parameters of a layer by their names in PyTorch."""
    return {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
