"""The operations on a CPU by the kernels in C, in float32 or bfloat16, with sums in float32.

In bfloat16 they multiply as fast as oneDNN, and do not have to compile for each number of rows. For
few rows, as a query has, they take three quarters to nine tenths of oneDNN's time. There is no
kernel for AMX, where oneDNN multiplies. Each operation between two products is one pass over the
memory.
"""

import ctypes
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import structlog
import torch
from torch import Tensor, nn
from torch.nn import functional

from smart_embedder.hardware.cpu import LargePages
from smart_embedder.kernels.attention import PackedAttention, QueryKeyValue, sdpa
from smart_embedder.kernels.backend import (
    NATIVE,
    Backend,
    Columns,
    EncoderParts,
    Int8Gemm,
    LayerNorm,
    Linear,
    QuantizedLinear,
    QuantizedRows,
    QuantizedWeights,
    RmsNorm,
    RotaryEmbedding,
    cpu_features,
    dequantize,
    join_layers,
    make_add_linear,
    onednn_backend,
    torch_backend,
)
from smart_embedder.kernels.build import (
    AARCH64,
    InstructionSet,
    arm_features,
    current_architecture,
    library_path,
)
from smart_embedder.kernels.packed_batch import PackedBatch

log = structlog.get_logger(__name__)

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
# The arguments as the C files declare them, without the last one, the number of threads.
_ARGUMENTS: dict[str, list[Any]] = {
    "attention": [_POINTER] * 4
    + [_INT, *[_LONG] * 6, _POINTER, *[_LONG] * 4, _FLOAT, _LONG, _LONG],
    "gemm": [_POINTER] * 8 + [_INT] * 2 + [_LONG] * 4 + [_INT],
    "add_norm": [_POINTER] * 2 + [_INT] + [_POINTER] * 2 + [_FLOAT] + [_LONG] * 2,
    "rms_norm": [_POINTER] * 3 + [_INT, _FLOAT] + [_LONG] * 2,
    "rotary": [_POINTER] * 2 + [_INT] + [_POINTER] * 2 + [_FLOAT] + [_LONG] * 4,
    "gate": [_POINTER] * 2 + [_INT] + [_LONG] * 2 + [_INT],
    "quantize_rows": [_POINTER, _INT] + [_POINTER] * 6 + [_LONG] * 3,
    "dequantize": [_POINTER] * 6 + [_INT] + [_LONG] * 2 + [_INT],
    "encoder_layer": [_POINTER] * 5 + [_LONG] * 2,
    "encoder_attention": [_POINTER] * 5 + [_LONG] * 2,
    "encoder_feed_forward": [_POINTER] * 5 + [_LONG],
}
# The values of `Format` in vector.h.
FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}
# The numbers of a row that most kernels compute at a time.
STEP = 16


class Library:
    """The functions of the library at `path`; raises `OSError` if it cannot be loaded."""

    def __init__(self, path: str, instructions: InstructionSet) -> None:
        library = ctypes.CDLL(path)
        self.instructions = instructions
        self._functions = {
            name: getattr(library, f"{name}_{instructions.name}") for name in _ARGUMENTS
        }
        for name, function in self._functions.items():
            function.argtypes = [*_ARGUMENTS[name], _INT]
            function.restype = None
        # With AMX PyTorch's threads multiply, and waiting kernel threads must not take their cores.
        passive = os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"
        if passive or "amx_tile" in cpu_features():
            library.set_watch(_LONG(0))

    def run(self, name: str, *arguments: float | None) -> None:
        """Call a function with as many threads as PyTorch uses."""
        self._functions[name](*arguments, torch.get_num_threads())


def runnable_instruction_sets() -> list[InstructionSet]:
    """Return the instruction sets that this processor has, the fastest first."""
    architecture = current_architecture()
    features = arm_features() if architecture is AARCH64 else cpu_features()
    return list(architecture.runnable(features))


@cache
def load_library() -> Library | None:
    """Load the kernels for the processor's fastest instruction set; None if there are none.

    If they were not built, or cannot be loaded, the log says so.
    """
    path, sets = library_path(), runnable_instruction_sets()
    if not sets:
        return None
    if not path.exists():
        log.info("kernels_not_built", build="python -m smart_embedder.kernels.build")
        return None
    try:
        return Library(str(path), sets[0])
    except OSError as error:
        log.warning("kernels_not_loaded", reason=str(error))
        return None


def address(tensor: Tensor, dtype: torch.dtype) -> int:
    """Return the address of a tensor; raises `ValueError` for a layout that kernels cannot read."""
    if tensor.dtype is not dtype or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(f"a kernel needs {dtype} numbers without gaps, not {tensor.dtype}")
    return tensor.data_ptr()


# The constants of activation.h, gemm.c, attention.c (MAX_WIDTH) and encoder.c.
_ACTIVATIONS = {None: 0, "gelu": 1, "relu": 2, "silu": 3, "gelu_new": 4, "gelu_pytorch_tanh": 4}
_PANEL = 64
_MAX_HEAD_WIDTH = 256
_ALIGNMENT = 64
# The four arguments of `gemm` that only 8-bit products have.
_NO_BYTES = (None,) * 4
# The number of keys beside a query that it attends to, if there is no window.
_EVERY_KEY = -1


def native_backend(library: Library, dtype: torch.dtype) -> Backend:
    """Make the backend of the kernels, with oneDNN and PyTorch for shapes that no kernel takes."""
    otherwise = onednn_backend(dtype, partial(dequantize_native, library=library))
    kernels = _NativeOperations(library, dtype, otherwise)
    operations = ("add_norm", "rms_norm", "rotary", "gate", "quantize_rows", "attention")
    backend = otherwise.prefer(NATIVE, **{name: getattr(kernels, name) for name in operations})
    backend = replace(backend, encoder_layer=kernels.encoder_layer)
    amx = cpu_features() if dtype is torch.bfloat16 else set()
    if "amx_tile" not in amx:
        multiply, int8_gemm = kernels.linear, kernels.int8_gemm
        backend = backend.prefer(
            NATIVE, linear=multiply, add_linear=make_add_linear(multiply), int8_gemm=int8_gemm
        )
    if "amx_bf16" in amx:
        backend = backend.prefer("sdpa", attention=sdpa)
    return replace(
        backend,
        int8_weight_limit=library.instructions.int8_weight_limit,
        kernels=f"{library.instructions.name}.{library_path().stem.removeprefix('kernels-')}",
    )


@dataclass(frozen=True, slots=True)
class NativeLinear:
    """A `Linear` in `dtype` with `out` output channels.

    `panels` are the weights in the layout of `gemm`. Further channels, also of `bias`, fill up the
    last panel.
    """

    library: Library
    panels: Tensor
    bias: Tensor
    out: int
    depth: int
    dtype: torch.dtype
    activation: str | None

    def __call__(self, states: Tensor) -> Tensor:
        """Implement `Linear`."""
        columns, number_format = len(self.bias), FORMATS[self.dtype]
        output = states.new_empty(len(states), columns)
        self.library.run(
            "gemm",
            address(states, self.dtype), self.panels.data_ptr(), *_NO_BYTES,
            self.bias.data_ptr(), output.data_ptr(), number_format, number_format, len(states),
            self.depth, columns, columns, _ACTIVATIONS[self.activation],
        )  # fmt: skip
        return output if columns == self.out else output[:, : self.out].contiguous()


class RowLinear(nn.Module):
    """A linear layer that computes each row to the same bits, whatever the other rows are."""

    def __init__(self, library: Library, layer: nn.Linear) -> None:
        """Copy the weights of `layer`; raises `ValueError` if the kernels cannot compute it."""
        super().__init__()
        dtype = layer.weight.dtype
        if dtype not in {torch.float32, torch.bfloat16} or not can_multiply(layer.in_features):
            raise ValueError(f"no kernel multiplies {layer.in_features} numbers in {dtype}")
        self._linear = _NativeOperations(library, dtype, torch_backend()).linear([layer])

    def forward(self, states: Tensor) -> Tensor:
        """Turn states `[rows, in]` into `[rows, out]`."""
        return self._linear(states.contiguous())


def use_row_linear(module: nn.Module) -> nn.Module:
    """Replace each linear layer in a module, or the module itself, by a `RowLinear`.

    Raises `ValueError` if the kernels are not built or cannot compute one of the layers.
    """
    library = load_library()
    if library is None:
        raise ValueError("the kernels are not built")
    if isinstance(module, nn.Linear):
        return RowLinear(library, module)
    for name, child in module.named_children():
        setattr(module, name, use_row_linear(child))
    return module


@dataclass(frozen=True, slots=True)
class NativeInt8Gemm:
    """An `Int8Gemm` with results in `dtype`; the values of `weights` are in `gemm`'s layout."""

    library: Library
    weights: QuantizedWeights
    depth: int
    dtype: torch.dtype
    activation: str | None

    def __call__(self, rows: QuantizedRows) -> Tensor:
        """Implement `Int8Gemm`."""
        weights, count, out = self.weights, len(rows.values), len(self.weights.bias)
        output = torch.empty(count, out, dtype=self.dtype)
        self.library.run(
            "gemm",
            address(rows.values, torch.uint8), weights.values.data_ptr(),
            address(rows.scale, torch.float32), address(rows.minimum, torch.float32),
            weights.scale.data_ptr(), weights.sums.data_ptr(), weights.bias.data_ptr(),
            output.data_ptr(), FORMATS[torch.uint8], FORMATS[self.dtype], count, self.depth, out,
            out, _ACTIVATIONS[self.activation],
        )  # fmt: skip
        return output


# The structures of encoder.c. They hold addresses of tensors; the parts of a layer own the tensors.


class _Linear(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("weights", "bias", "scale", "sums")),
        *((name, _POINTER) for name in ("factors", "offsets", "repeated")),
        *((name, _LONG) for name in ("repeats", "depth", "columns")),
        ("activation", _INT),
    )


class _LayerNorm(ctypes.Structure):
    _fields_ = (("weight", _POINTER), ("bias", _POINTER), ("epsilon", _FLOAT))


class _EncoderLayer(ctypes.Structure):
    _fields_ = (
        *((name, _Linear) for name in ("to_query_key_value", "from_attended")),
        *((name, _Linear) for name in ("to_inner", "from_inner")),
        *((name, _LayerNorm) for name in ("attention_norm", "output_norm")),
        ("heads", _LONG),
        ("scale", _FLOAT),
        ("format", _INT),
    )


def _describe_linear(product: Linear, dtype: torch.dtype) -> _Linear | None:
    """Describe a product of states in `dtype` for encoder.c; None if no kernel computes it."""
    match product:
        case NativeLinear() if product.dtype is dtype and product.out == len(product.bias):
            panels, bias = product.panels.data_ptr(), product.bias
            code = _ACTIVATIONS[product.activation]
            return _Linear(
                panels, bias.data_ptr(), depth=product.depth, columns=len(bias), activation=code
            )
        case QuantizedLinear(columns, NativeInt8Gemm() as gemm) if gemm.dtype is dtype:
            weights, repeats = gemm.weights, len(columns.repeated)
            tensors = (
                weights.values, weights.bias, weights.scale, weights.sums, columns.factors,
                columns.offsets, columns.repeated,
            )  # fmt: skip
            pointers = (tensor.data_ptr() for tensor in tensors)
            code = _ACTIVATIONS[gemm.activation]
            return _Linear(*pointers, repeats, gemm.depth - repeats, len(weights.bias), code)
    return None


class _ScratchMemory(threading.local):
    """Memory that a thread keeps for its next call; the system would have to clear new pages."""

    bytes = torch.empty(0, dtype=torch.uint8)

    def address_of(self, size: int) -> int:
        if len(self.bytes) < size:
            self.bytes = torch.empty(size, dtype=torch.uint8)
        return self.bytes.data_ptr()


_scratch = _ScratchMemory()


class NativeEncoderLayer:
    """A layer in one call, or in two calls, between which another forward may run.

    The results are those of the single operations, to the last bit.
    """

    def __init__(self, library: Library, layer: _EncoderLayer, dtype: torch.dtype) -> None:
        self._library, self._layer, self._dtype = library, layer, dtype
        products = (
            layer.to_query_key_value, layer.from_attended, layer.to_inner, layer.from_inner
        )  # fmt: skip
        projected, attended, inner = (
            _round_up(product.columns * dtype.itemsize) for product in products[:3]
        )
        # A quantized row has its bytes, a scale and a minimum.
        quantized = (max(product.depth + product.repeats for product in products), 4, 4)
        # The scratch memory that encoder.c takes for each row.
        self._bytes_per_row = (
            attended + max(projected, attended + inner) + sum(map(_round_up, quantized))
        )

    def forward(self, states: Tensor, packed: PackedBatch) -> Tensor:
        """Compute the whole layer on states `[T, width]`."""
        return self._run_with_attention("encoder_layer", states, packed)

    def attention(self, states: Tensor, packed: PackedBatch) -> Tensor:
        """Compute the attention on states `[T, width]`; the result is for `feed_forward`."""
        return self._run_with_attention("encoder_attention", states, packed)

    def _run_with_attention(self, function: str, states: Tensor, packed: PackedBatch) -> Tensor:
        output = torch.empty_like(states)
        memory = _scratch.address_of(len(states) * self._bytes_per_row)
        self._library.run(
            function,
            ctypes.addressof(self._layer), address(states, self._dtype), output.data_ptr(),
            memory, packed.offsets.ctypes.data, len(packed.unpack_order), len(states),
        )  # fmt: skip
        return output

    def feed_forward(self, attended: Tensor, states: Tensor) -> Tensor:
        """Compute the rest of the layer, each row by itself."""
        output = torch.empty_like(states)
        memory = _scratch.address_of(len(states) * self._bytes_per_row)
        self._library.run(
            "encoder_feed_forward",
            ctypes.addressof(self._layer), address(attended, self._dtype),
            address(states, self._dtype), output.data_ptr(), memory, len(states),
        )  # fmt: skip
        return output


def _round_up(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class _NativeOperations:
    """The operations of `Backend` in C; `otherwise` computes shapes that no kernel takes."""

    def __init__(self, library: Library, dtype: torch.dtype, otherwise: Backend) -> None:
        self._library = library
        self._dtype = dtype
        self._format = FORMATS[dtype]
        self._otherwise = otherwise
        self._memory = LargePages()

    def linear(self, layers: Sequence[nn.Linear], activation: str | None = None) -> Linear:
        depth, out = layers[0].in_features, sum(layer.out_features for layer in layers)
        if layers[0].weight.dtype is not self._dtype or not can_multiply(depth):
            return self._otherwise.linear(layers, activation)
        weight, bias = join_layers(layers)
        bias = torch.zeros(out) if bias is None else bias.float()
        if missing := -out % _PANEL:
            weight, bias = (
                functional.pad(weight, (0, 0, 0, missing)),
                functional.pad(bias, (0, missing)),
            )
        return NativeLinear(
            self._library,
            self._panels(weight),
            bias.contiguous(),
            out,
            depth,
            self._dtype,
            activation,
        )

    def add_norm(self, states: Tensor, residual: Tensor, norm: LayerNorm) -> Tensor:
        self._library.run(
            "add_norm",
            address(states, self._dtype), address(residual, self._dtype), self._format,
            norm.weight.data_ptr(), norm.bias.data_ptr(), norm.epsilon, *states.shape,
        )  # fmt: skip
        return states

    def rms_norm(self, states: Tensor, norm: RmsNorm) -> Tensor:
        output = torch.empty_like(states)
        self._library.run(
            "rms_norm",
            address(states, self._dtype), address(norm.weight, self._dtype), output.data_ptr(),
            self._format, norm.epsilon, *states.shape,
        )  # fmt: skip
        return output

    def rotary(self, states: Tensor, norm: RmsNorm, embedding: RotaryEmbedding) -> None:
        self._library.run(
            "rotary",
            address(states, self._dtype), address(norm.weight, self._dtype), self._format,
            address(embedding.cosines, torch.float32), address(embedding.sines, torch.float32),
            norm.epsilon, len(states), states.stride(0), *norm.weight.shape,
        )  # fmt: skip

    def gate(self, states: Tensor, activation: str) -> Tensor:
        width = states.shape[1] // 2
        if width % STEP:
            return self._otherwise.gate(states, activation)
        output = states.new_empty(len(states), width)
        self._library.run(
            "gate",
            address(states, self._dtype), output.data_ptr(), self._format, len(states), width,
            _ACTIVATIONS[activation],
        )  # fmt: skip
        return output

    def attention(
        self,
        states: QueryKeyValue,
        packed: PackedBatch,
        *,
        scale: float,
        causal: bool,
        window: int | None = None,
    ) -> Tensor:
        """Implement `Attention` with FlashAttention's method: scores are only in the cache."""
        query, key, value = states
        heads, tokens, width = query.shape
        numbers_of_word = 4 // query.element_size()
        if (
            query.dtype is not self._dtype
            or not can_attend(width)
            or not query.stride(-1) == key.stride(-1) == 1
            or key.stride(1) % numbers_of_word
            or key.shape != value.shape
            or key.stride() != value.stride()
        ):
            attend = PackedAttention(sdpa, packed)
            return attend(states, scale=scale, causal=causal, window=window)
        before = _EVERY_KEY if window is None else window - 1
        output = query.new_empty(tokens, heads, width)
        output[packed.real_tokens :] = 0
        self._library.run(
            "attention",
            query.data_ptr(), key.data_ptr(), value.data_ptr(), output.data_ptr(), self._format,
            query.stride(1), query.stride(0), key.stride(1), key.stride(0),
            output.stride(0), output.stride(1),
            packed.offsets.ctypes.data, len(packed.unpack_order),
            heads, heads // len(key), width, scale, before, 0 if causal else before,
        )  # fmt: skip
        return output

    def quantize_rows(self, states: Tensor, columns: Columns) -> QuantizedRows:
        count, width = states.shape
        if width % STEP:
            return self._otherwise.quantize_rows(states, columns)
        values = torch.empty(count, len(columns.offsets), dtype=torch.uint8)
        scale, minimum = torch.empty(count, 1), torch.empty(count, 1)
        self._library.run(
            "quantize_rows",
            address(states, states.dtype), FORMATS[states.dtype],
            columns.factors.data_ptr(), columns.offsets.data_ptr(), columns.repeated.data_ptr(),
            values.data_ptr(), scale.data_ptr(), minimum.data_ptr(),
            count, width, len(columns.repeated),
        )  # fmt: skip
        return QuantizedRows(values, scale, minimum)

    def int8_gemm(
        self, weights: QuantizedWeights, dtype: torch.dtype, activation: str | None = None
    ) -> Int8Gemm:
        out, depth = weights.values.shape
        if out % _PANEL or not can_multiply(depth):
            # oneDNN's sums are exact, too.
            return self._otherwise.int8_gemm(weights, dtype, activation)
        weights = replace(weights, values=self._panels(weights.values))
        return NativeInt8Gemm(self._library, weights, depth, dtype, activation)

    def encoder_layer(self, parts: EncoderParts) -> NativeEncoderLayer | None:
        """Prepare a layer for encoder.c; return None if the kernels do not compute all of it."""
        backend, width = parts.backend, len(parts.output_norm.weight)
        native = self.add_norm, self.attention, self.quantize_rows
        if (
            (backend.add_norm, backend.attention, backend.quantize_rows) != native
            or width % (STEP * parts.heads)
            or width // parts.heads > _MAX_HEAD_WIDTH
        ):
            return None
        products = (
            parts.to_query_key_value, parts.from_attended, parts.to_inner, parts.from_inner
        )  # fmt: skip
        described = [_describe_linear(product, self._dtype) for product in products]
        if not all(described):
            return None
        norms = (
            _LayerNorm(norm.weight.data_ptr(), norm.bias.data_ptr(), norm.epsilon)
            for norm in (parts.attention_norm, parts.output_norm)
        )
        layer = _EncoderLayer(
            *described, *norms, parts.heads, (width // parts.heads) ** -0.5, self._format
        )
        return NativeEncoderLayer(self._library, layer, self._dtype)

    def _panels(self, weight: Tensor) -> Tensor:
        """Copy weights `[out, depth]` into panels `[out / tile, words / n, tile, n]`.

        A word has 4 bytes. n is 2 for matrix instructions, which do not exist for float32, else 1.
        """
        instructions, words = self._library.instructions, weight.contiguous().view(torch.int32)
        paired = 1 if weight.dtype is torch.float32 else instructions.matrix_rows
        tile = instructions.tile // 2
        panels = words.view(len(words) // tile, tile, -1, paired)
        return self._memory.copy(panels.transpose(1, 2))


def can_multiply(*depths: int) -> bool:
    """Whether the kernels multiply rows of these numbers of columns."""
    return not any(depth % STEP for depth in depths)


def can_attend(head_width: int) -> bool:
    """Whether the attention kernel takes heads of this width."""
    return head_width % STEP == 0 and head_width <= _MAX_HEAD_WIDTH


def dequantize_native(
    product: Tensor,
    rows: QuantizedRows,
    weights: QuantizedWeights,
    dtype: torch.dtype,
    activation: str | None,
    *,
    library: Library,
) -> Tensor:
    """Compute `backend.dequantize` in one pass."""
    if product.shape[1] % STEP:
        return dequantize(product, rows, weights, dtype, activation)
    tensors = product, rows.scale, rows.minimum, weights.sums, weights.bias
    output = torch.empty_like(product, dtype=dtype)
    library.run(
        "dequantize",
        *(address(tensor, torch.float32) for tensor in tensors),
        output.data_ptr(), FORMATS[dtype], *product.shape, _ACTIVATIONS[activation],
    )  # fmt: skip
    return output
