"""The operations of a model's layers: a table of them, and their implementations by libraries.

PyTorch's operators compute every operation on every device, and are the reference in tests. oneDNN
and the kernels in `native` and `cuda` put faster implementations in front of them with
`Backend.prefer`. No row of a result depends on the other rows of its batch.
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

# The name of the implementations in C.
NATIVE = "native"
# From `[T, in]` to `[T, out]`.
Linear = Callable[[Tensor], Tensor]
# From `[T, in]` and a residual `[T, out]`, which may be overwritten, to the product plus residual.
AddLinear = Callable[[Tensor, Tensor], Tensor]
# The activations by transformers' names, with oneDNN's names for them: (operation, algorithm).
ACTIVATIONS = {
    None: ("none", ""),
    "gelu": ("gelu", "none"),
    "gelu_new": ("gelu", "tanh"),
    "gelu_pytorch_tanh": ("gelu", "tanh"),
    "relu": ("relu", ""),
    "silu": ("swish", ""),
}
# transformers' further names for them.
_SAME_ACTIVATIONS = {
    "swish": "silu",
    "gelu_python": "gelu",
    "gelu_fast": "gelu_new",
    "gelu_accurate": "gelu_new",
    "gelu_python_tanh": "gelu_new",
}


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Layer normalisation over the last dimension; on a CPU its parameters are always float32."""

    weight: Tensor
    bias: Tensor
    epsilon: float

    def __call__(self, states: Tensor) -> Tensor:
        """Normalise `states`; the result has their dtype."""
        return functional.layer_norm(
            states, self.weight.shape, self.weight, self.bias, self.epsilon
        )


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """Normalisation by the root mean square; the weight may be `[heads, width]`."""

    weight: Tensor
    epsilon: float

    @classmethod
    def identity(cls, heads: int, like: Tensor) -> "RmsNorm":
        """Make a norm that changes nothing, for heads that are rotated without a norm.

        Heads are `[width]`, in the dtype and on the device of `like`. The epsilon is so large that
        the states' squares vanish beside it, and products with powers of two are exact. float16
        has no such powers.
        """
        return cls(torch.full((heads, len(like)), 2.0**50).to(like), 2.0**100)

    def __call__(self, states: Tensor) -> Tensor:
        """Normalise `states` over the last dimension; the result has their dtype."""
        return functional.rms_norm(states, self.weight.shape[-1:], None, self.epsilon) * self.weight


@dataclass(frozen=True, slots=True)
class RotaryEmbedding:
    """Rotary position embedding (Su et al. 2021): cosines and sines `[T, width / 2]`, float32."""

    cosines: Tensor
    sines: Tensor

    @classmethod
    def at(cls, positions: Tensor, width: int, theta: float) -> "RotaryEmbedding":
        """Compute the embedding of tokens at `positions` `[T]`, for heads of `width` numbers."""
        pair = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device)
        angles = positions[:, None].float() * (1.0 / theta ** (pair / width))
        return cls(angles.cos(), angles.sin())


@dataclass(frozen=True, slots=True)
class Columns:
    """How a row of `width` channels is quantized to columns of bytes.

    Each channel is multiplied by its number in `factors` `[width]`. The channels in `repeated`
    `[repeats]` int32 get further columns behind the others. `offsets` `[width + repeats]` are added
    to the columns before they are truncated. The offsets of a channel's k columns are 1/k apart, so
    that the sum of these columns is k times the channel, rounded.
    """

    factors: Tensor
    repeated: Tensor
    offsets: Tensor

    def spread(self, steps: Tensor) -> Tensor:
        """Turn `[T, width]`, in quantization steps, into whole numbers `[T, width + repeats]`."""
        return torch.cat([steps, steps[:, self.repeated]], 1).add_(self.offsets).floor_()


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Rows in 8 bits: `scale` x `values` + `minimum`.

    `values` is `[T, columns]` u8, `scale` and `minimum` are `[T, 1]`.
    """

    values: Tensor
    scale: Tensor
    minimum: Tensor


@dataclass(frozen=True, slots=True)
class QuantizedWeights:
    """Weights in 8 bits: `scale` x `values`, and the `bias` of the product.

    `values` is `[out, columns]` s8, all others are `[out]`. `sums` are the sums of the scaled
    values of each output channel.
    """

    values: Tensor
    scale: Tensor
    sums: Tensor
    bias: Tensor


# Rows `[T, width]` in float8 (e4m3), and their scales `[T, 1]` float32.
Float8Rows = tuple[Tensor, Tensor]

# The product of rows with weights: `[T, out]`.
Int8Gemm = Callable[[QuantizedRows], Tensor]


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """Computes `activation(x W + b)`, `[T, in]` to `[T, out]`, with a product in 8 bits."""

    columns: Columns
    gemm: Int8Gemm
    backend: "Backend"

    def __call__(self, states: Tensor) -> Tensor:
        """Implement `Linear`."""
        return self.gemm(self.backend.quantize_rows(states, self.columns))


@dataclass(frozen=True, slots=True)
class EncoderParts:
    """A layer of BERT's kind: attention and feed-forward, with a norm after each.

    `backend` computes everything between the products.
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
    """The chosen implementation of each operation, and a table of all implementations.

    Each field is the call of an operation. `table` has the implementations of each operation by
    name, the fastest first. `int8_weight_limit` is the largest absolute value of a weight for which
    `int8_gemm` is exact. `kernels` names the instruction set and the sources of the kernels in C,
    if they are used.
    """

    # (layers, activation=None): prepares `activation(x W + b)` for layers that read the same x;
    # their outputs lie side by side.
    linear: Callable[..., Linear]
    # Prepares `x W + b` plus a residual, which may be overwritten.
    add_linear: Callable[[nn.Linear], AddLinear]
    # (indices, tables, norm): looks up rows in two tables, adds them and normalises the sum,
    # `[T, width]`. The indices are int64.
    embed: Callable[[tuple[Tensor, Tensor], tuple[Tensor, Tensor], LayerNorm], Tensor]
    # (states, residual, norm): normalises the sum of two tensors `[T, width]`; the states may be
    # overwritten.
    add_norm: Callable[[Tensor, Tensor, LayerNorm], Tensor]
    # Normalises `[T, width]`.
    rms_norm: Callable[[Tensor, RmsNorm], Tensor]
    # Normalises and rotates, in place, the first heads of `[T, H, width]`, those that the norm has
    # weights for. A rotated pair has one number in each half of a head.
    rotary: Callable[[Tensor, RmsNorm, RotaryEmbedding], None]
    # (states, activation): computes `activation(x) y` `[T, width]` for the halves x and y of
    # `[T, 2 width]`, which may be overwritten.
    gate: Callable[[Tensor, str], Tensor]
    # (states, dtype, indices=None): divides rows of `[T, width]` by their lengths. Returns the rows
    # in `dtype`, and the lengths in float32. `indices` int64 selects rows; None selects all.
    unit_rows: Callable[..., tuple[Tensor, Tensor]]
    # Quantizes each row of `[T, width]`, float32 or bfloat16, to 255 steps of its own range.
    quantize_rows: Callable[[Tensor, Columns], QuantizedRows]
    # (weights, dtype, activation=None): prepares `activation(rows x weights + bias)` in `dtype`.
    int8_gemm: Callable[..., Int8Gemm]
    # (states, activation=None): rounds each row of `activation(states)`, `[T, width]`, to float8,
    # scaled so that the row uses the whole range. The states may be overwritten.
    float8_rows: Callable[..., Float8Rows]
    # (rows, weights, bias, dtype): multiplies rows with weights `[out, width]` to `[T, out]`.
    float8_product: Callable[[Float8Rows, Float8Rows, Tensor | None, torch.dtype], Tensor]
    attention: Attention
    # Prepares a layer as a `native.NativeEncoderLayer`, or returns None if the backend has none.
    encoder_layer: Callable[[EncoderParts], Any]
    table: dict[str, dict[str, Callable[..., Any]]]
    int8_weight_limit: int = MAX_INT8
    kernels: str = ""

    def prefer(self, name: str, **implementations: Any) -> "Backend":
        """Return a copy that prefers these implementations of some operations, under `name`."""
        table = {
            operation: {name: fastest} | self.table[operation] | {name: fastest}
            for operation, fastest in implementations.items()
        }
        return replace(self, table={**self.table, **table}, **implementations)

    def fastest(self, operation: str) -> str:
        """Return the name of an operation's fastest implementation."""
        return next(iter(self.table[operation]))

    def select(self, operation: str, name: str) -> "Backend":
        """Return a copy that uses the implementation `name` of an operation."""
        chosen: dict[str, Any] = {operation: self.table[operation][name]}
        return replace(self, **chosen)


def torch_backend() -> Backend:
    """Make the backend of PyTorch's operators, which run on every device and in every dtype."""
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
    table = {operation: {"torch": operator} for operation, operator in operators.items()}
    table["attention"] = {"sdpa": sdpa, "eager": eager}
    return Backend(**operators, attention=sdpa, encoder_layer=lambda _: None, table=table)


def unprepared_backend() -> Backend:
    """Make a backend that calls each linear layer as it is and makes no copy of its weights."""

    def multiply(layers: Sequence[nn.Linear], activation: str | None = None) -> Linear:
        return lambda states: activate(
            torch.cat([layer(states) for layer in layers], 1), activation
        )

    return torch_backend().prefer("torch", linear=multiply, add_linear=make_add_linear(multiply))


# The smallest divisor of a row, as in `torch.nn.functional.normalize`.
MIN_ROW_LENGTH = 1e-12
# The number of steps between a quantized row's minimum and maximum.
_QUANTIZATION_STEPS = 255
_TINY = 1e-30
# The largest number of float8 (e4m3).
MAX_FLOAT8 = 448.0


def linear(layers: Sequence[nn.Linear], activation: str | None = None) -> Linear:
    """Implement `Backend.linear` with PyTorch."""
    weight, bias = join_layers(layers)
    return lambda states: activate(functional.linear(states, weight, bias), activation)


def make_add_linear(linear: Callable[..., Linear]) -> Callable[[nn.Linear], AddLinear]:
    """Make an implementation of `Backend.add_linear` from one of `Backend.linear`."""

    def add_linear(layer: nn.Linear) -> AddLinear:
        multiply = linear([layer])
        return lambda states, residual: multiply(states).add_(residual)

    return add_linear


def embed(indices: tuple[Tensor, Tensor], tables: tuple[Tensor, Tensor], norm: LayerNorm) -> Tensor:
    """Implement `Backend.embed` with PyTorch."""
    states, residual = map(functional.embedding, indices, tables)
    return add_norm(states, residual, norm)


def add_norm(states: Tensor, residual: Tensor, norm: LayerNorm) -> Tensor:
    """Implement `Backend.add_norm` with PyTorch."""
    return norm(states.add_(residual))


def rms_norm(states: Tensor, norm: RmsNorm) -> Tensor:
    """Implement `Backend.rms_norm` with PyTorch."""
    return norm(states)


def rotary(states: Tensor, norm: RmsNorm, embedding: RotaryEmbedding) -> None:
    """Implement `Backend.rotary` with PyTorch."""
    heads = states[:, : len(norm.weight)]
    cosines, sines = embedding.cosines[:, None], embedding.sines[:, None]
    first, second = norm(heads).float().chunk(2, dim=-1)
    rotated = first * cosines - second * sines, second * cosines + first * sines
    heads.copy_(torch.cat(rotated, dim=-1).to(states.dtype))


def gate(states: Tensor, activation: str) -> Tensor:
    """Implement `Backend.gate` with PyTorch."""
    gates, values = states.chunk(2, dim=-1)
    return activate(gates, activation).mul(values)


def unit_rows(
    states: Tensor, dtype: torch.dtype, indices: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Implement `Backend.unit_rows` with PyTorch."""
    rows = (states if indices is None else states.index_select(0, indices)).float()
    lengths = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return (rows / lengths.clamp_min(MIN_ROW_LENGTH)).to(dtype), lengths.squeeze(-1)


def quantize_rows(states: Tensor, columns: Columns) -> QuantizedRows:
    """Implement `Backend.quantize_rows` with PyTorch."""
    states = states * columns.factors
    minimum, maximum = states.aminmax(dim=1, keepdim=True)
    scale = (maximum - minimum) / _QUANTIZATION_STEPS
    steps = states.sub_(minimum).div_(scale.clamp_min(_TINY))
    return QuantizedRows(columns.spread(steps).to(torch.uint8), scale, minimum)


def int8_gemm(
    weights: QuantizedWeights, dtype: torch.dtype, activation: str | None = None
) -> Int8Gemm:
    """Implement `Backend.int8_gemm` with PyTorch: exact and slow, in float64."""
    exact = weights.values.double().t() * weights.scale.double()
    return lambda rows: dequantize(rows.values.double() @ exact, rows, weights, dtype, activation)


def dequantize(
    product: Tensor,
    rows: QuantizedRows,
    weights: QuantizedWeights,
    dtype: torch.dtype,
    activation: str | None,
) -> Tensor:
    """Turn the product of quantized rows with scaled weights into the result of `int8_gemm`.

    `product` is `[T, out]` and may be overwritten.
    """
    product.mul_(rows.scale).addcmul_(rows.minimum, weights.sums).add_(weights.bias)
    return activate(product, activation).to(dtype)


def float8_rows(states: Tensor, activation: str | None = None) -> Float8Rows:
    """Implement `Backend.float8_rows` with PyTorch."""
    numbers = activate(states.float(), activation)
    max_abs = numbers.abs().amax(1, keepdim=True).clamp_min(_TINY)
    # A tensor: to divide by a number from the host, PyTorch would multiply with its reciprocal on
    # a GPU.
    limit = torch.full_like(max_abs, MAX_FLOAT8)
    steps = (numbers * (limit / max_abs)).clamp(-MAX_FLOAT8, MAX_FLOAT8)
    return steps.to(torch.float8_e4m3fn), max_abs / limit


def float8_product(
    rows: Float8Rows, weights: Float8Rows, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Implement `Backend.float8_product` with PyTorch: slow, in float32."""
    states, weight = (values.float() * scales for values, scales in (rows, weights))
    return functional.linear(states, weight, None if bias is None else bias.float()).to(dtype)


def float8_backend(backend: Backend, dtype: torch.dtype) -> Backend:
    """Make a copy of `backend` that computes products in float8, with results in `dtype`.

    A product with an activation returns rows in float8 for the next product: the activation is
    computed in the pass that rounds them.
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
    """Compute one of `ACTIVATIONS`; `states` may be overwritten."""
    operation, algorithm = ACTIVATIONS[activation]
    match operation:
        case "gelu":
            return functional.gelu(states, approximate=algorithm)
        case "relu":
            return states.relu_()
        case "swish":
            return functional.silu(states)
    return states


def find_activation(name: object) -> str | None:
    """Return the activation of `ACTIVATIONS` that transformers calls `name`, or None."""
    known = _SAME_ACTIVATIONS.get(str(name), str(name))
    return known if known in ACTIVATIONS else None


def join_layers(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Join weights `[out, in]` and biases of layers; those of a single layer are not copied."""
    weights = [layer.weight.detach() for layer in layers]
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    if len(layers) == 1:
        return weights[0], biases[0] if biases else None
    return torch.cat(weights), torch.cat(biases) if biases else None


# oneDNN packs weights for a number of rows; the packed weights take any number.
_PACKED_FOR_ROWS = 256


def onednn_backend(dtype: torch.dtype, dequantize: Callable[..., Tensor] = dequantize) -> Backend:
    """Make the backend of PyTorch's operators and oneDNN's matrix products on a CPU.

    Weights are packed once; bias and activation are computed within the product. The operators are
    those that PyTorch's compiler emits for frozen weights. In float32 PyTorch's product is as fast
    and needs no packed copy. oneDNN knows no scale for each row of bytes, so `dequantize` follows
    as a separate pass.
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

    backend = torch_backend().prefer("onednn", int8_gemm=int8_gemm)
    features = cpu_features()
    if dtype is torch.bfloat16:
        available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        if available and "avx512_bf16" in features:
            multiply = _linear_by_onednn
            backend = backend.prefer(
                "onednn", linear=multiply, add_linear=make_add_linear(multiply)
            )
        # `matmul` was measured on x86 alone; with AMX PyTorch's attention is faster.
        if platform.machine() in {"x86_64", "AMD64"} and "amx_bf16" not in features:
            backend = backend.prefer("matmul", attention=matmul)
    # These sum products of bytes in 32 bits. AVX2 sums pairs of them in 16 bits first.
    exact = features & {"amx_int8", "avx512_vnni", "avx_vnni"}
    return replace(backend, int8_weight_limit=MAX_INT8 if exact else MAX_INT8_IN_PAIRS)


def _linear_by_onednn(layers: Sequence[nn.Linear], activation: str | None = None) -> Linear:
    """Implement `Backend.linear` with oneDNN; leaves layers in float32 to PyTorch."""
    if layers[0].weight.dtype is not torch.bfloat16:
        return linear(layers, activation)
    weight, bias = join_layers(layers)
    # oneDNN's ReLU turns NaN into 0, so PyTorch's follows the product instead.
    fused, separate = (None, "relu") if activation == "relu" else (activation, None)
    operation, algorithm = ACTIVATIONS[fused]
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)  # noqa: SLF001
    compute = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001

    def multiply(states: Tensor) -> Tensor:
        product: Tensor = compute(states, packed, bias, operation, [], algorithm)
        return activate(product, separate)

    return multiply


def cpu_features() -> set[str]:
    """Return the processor's features by PyTorch's names."""
    return {name for name, value in torch.cpu.get_capabilities().items() if value is True}


def make_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Make a linear layer of these tensors without a copy."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    linear.load_state_dict(parameter_dict(weight, bias), assign=True)
    return linear


def parameter_dict(weight: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
    """Return the parameters of a layer by their names in PyTorch."""
    return {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
