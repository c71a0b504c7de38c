"""The operations on NVIDIA GPUs: attention over packed sequences, and kernels in CUDA.

The kernels are compiled at the start, for the GPU and one dtype. If that fails, PyTorch's operators
compute the same results.
"""

import ctypes
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor, nn

from smart_embedder.errors import StartupError
from smart_embedder.kernels.attention import (
    FLASH_MODULES,
    has_flash_attention,
    load_attention,
    memory_efficient,
    varlen,
)
from smart_embedder.kernels.backend import (
    MIN_ROW_LENGTH,
    AddLinear,
    Backend,
    Float8Rows,
    LayerNorm,
    Linear,
    RmsNorm,
    RotaryEmbedding,
    activate,
    linear,
    make_add_linear,
    torch_backend,
)

log = structlog.get_logger(__name__)

# The name of the implementations by PyTorch's operators for NVIDIA GPUs.
CUDA = "cuda"
SOURCE = Path(__file__).parent / "csrc" / "row_ops.cu"
# The kernels that are operations of a backend; `gelu` is a part of one.
_OPERATIONS = ("embed", "add_norm", "rms_norm", "rotary", "gate", "unit_rows", "float8_rows")
NAMES = (*_OPERATIONS, "gelu")
_MACROS = {torch.float16: "FLOAT16", torch.bfloat16: "BFLOAT16", torch.float32: "FLOAT32"}
# As in row_ops.cu: a thread loads this many numbers at once, and holds that many times as many in
# `float8_rows`; a block has at most 1,024 threads.
_VECTOR_WIDTH = 8
_FLOAT8_VECTORS = 4
_WARP = 32
_MAX_WIDTH = 8192
_MAX_WARPS = 32
_GATE_THREADS = 256
_ALIGNMENT = 16
# The major number of Hopper's compute capability.
_HOPPER = 9


def cuda_backend(device: torch.device, dtype: torch.dtype) -> Backend:
    """Make the backend of PyTorch's operators for NVIDIA GPUs, with attention over packed rows."""
    # Otherwise the last bits of large sums in half precision depend on how cuBLAS divides the work.
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    backend = torch_backend().prefer(CUDA, add_linear=_add_linear, float8_product=_float8_product)
    backend = backend.prefer("sdpa", attention=memory_efficient)
    if not has_flash_attention(device, dtype):
        return backend
    backend = backend.prefer("varlen", attention=varlen)
    hopper = torch.cuda.get_device_capability(device)[0] == _HOPPER
    return _with_hopper_attention(backend) if hopper else backend


def _with_hopper_attention(backend: Backend) -> Backend:
    """Prefer FlashAttention 3 if its package is installed.

    The package is called directly: `torch.nn.attention.activate_flash_attention_impl` would replace
    PyTorch's kernel in the whole process, and the two could not be compared any more.
    """
    name = "flash_attention_3"
    if find_spec(FLASH_MODULES[name][0]) is None:
        return backend
    try:
        return backend.prefer(name, attention=load_attention(name))
    except StartupError as error:
        log.warning(
            "path_refused",
            operation="attention",
            path=name,
            reason=str(error),
            used_instead=backend.fastest("attention"),
        )
        return backend


def _add_linear(layer: nn.Linear) -> AddLinear:
    """Implement `Backend.add_linear`; adds the residual within the product."""
    if layer.bias is not None:
        return make_add_linear(linear)(layer)
    weight = layer.weight.detach().t()
    return lambda states, residual: residual.addmm_(states, weight)


def _float8_product(
    rows: Float8Rows, weights: Float8Rows, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Implement `Backend.float8_product` with the tensor cores.

    Fast accumulation is less exact than float32, but its error is far below that of the rounding.
    """
    (values, scales), (weight, weight_scales) = rows, weights
    product: Tensor = torch._scaled_mm(  # noqa: SLF001
        values, weight.t(), scales, weight_scales.t(), bias, out_dtype=dtype, use_fast_accum=True
    )
    return product


def fused_backend(kernels: "CudaKernels", dtype: torch.dtype, otherwise: Backend) -> Backend:
    """Put the operations between two matrix products, one kernel each, in front of `otherwise`."""
    fused = _FusedOperations(kernels, dtype, otherwise)
    backend = otherwise.prefer("fused", **{name: getattr(fused, name) for name in _OPERATIONS})
    # The kernel's GELU is not exact enough for float32.
    return backend if dtype is torch.float32 else backend.prefer("fused", linear=fused.linear)


class _FusedOperations:
    """Operations of `Backend` with sums in float32; `otherwise` computes shapes no kernel takes."""

    def __init__(self, kernels: "CudaKernels", dtype: torch.dtype, otherwise: Backend) -> None:
        self._kernels = kernels
        self._dtype = dtype
        self._otherwise = otherwise

    def linear(self, layers: Sequence[nn.Linear], activation: str | None = None) -> Linear:
        """Compute GELU in four fifths of the time of PyTorch's, which arithmetic limits."""
        if activation != "gelu":
            return self._otherwise.linear(layers, activation)
        multiply = self._otherwise.linear(layers)

        def multiply_and_activate(states: Tensor) -> Tensor:
            product = multiply(states)
            if product.shape[1] % _VECTOR_WIDTH or not _is_aligned(product) or not len(product):
                return activate(product, activation)
            count = LongLong(product.numel() // _VECTOR_WIDTH)
            blocks = -(-count // _GATE_THREADS)
            self._kernels.run("gelu", blocks, _GATE_THREADS, product, count)
            return product

        return multiply_and_activate

    def embed(
        self, indices: tuple[Tensor, Tensor], tables: tuple[Tensor, Tensor], norm: LayerNorm
    ) -> Tensor:
        """An index that a table does not have gives a row of NaN."""
        if not _can_fuse(*tables, norm.weight, norm.bias):
            return self._otherwise.embed(indices, tables, norm)
        (first, second), (tokens, positions) = indices, tables
        width = tokens.shape[1]
        output = tokens.new_empty(len(first), width)
        self._kernels.run(
            "embed", len(first), _count_threads(width),
            first, tokens, second, positions, norm.weight, norm.bias, output,
            norm.epsilon, len(tokens), len(positions), width,
        )  # fmt: skip
        return output

    def add_norm(self, states: Tensor, residual: Tensor, norm: LayerNorm) -> Tensor:
        if not _can_fuse(states, residual, norm.weight, norm.bias):
            return self._otherwise.add_norm(states, residual, norm)
        rows, width = states.shape
        self._kernels.run(
            "add_norm", rows, _count_threads(width),
            states, residual, norm.weight, norm.bias, norm.epsilon, width,
        )  # fmt: skip
        return states

    def rms_norm(self, states: Tensor, norm: RmsNorm) -> Tensor:
        if not _can_fuse(states, norm.weight):
            return self._otherwise.rms_norm(states, norm)
        rows, width = states.shape
        output = torch.empty_like(states)
        self._kernels.run(
            "rms_norm", rows, _count_threads(width),
            states, norm.weight, output, norm.epsilon, width,
        )  # fmt: skip
        return output

    def rotary(self, states: Tensor, norm: RmsNorm, embedding: RotaryEmbedding) -> None:
        heads, width = norm.weight.shape
        if norm.weight.dtype is states.dtype and states.is_contiguous():
            self._kernels.run(
                "rotary", len(states), min(heads, _MAX_WARPS) * _WARP,
                states, norm.weight, embedding.cosines, embedding.sines, norm.epsilon,
                states.stride(0), heads, width,
            )  # fmt: skip
        else:
            self._otherwise.rotary(states, norm, embedding)

    def gate(self, states: Tensor, activation: str) -> Tensor:
        rows, width = states.shape[0], states.shape[1] // 2
        if activation != "silu" or width % _VECTOR_WIDTH or not _is_aligned(states):
            return self._otherwise.gate(states, activation)
        output = states.new_empty(rows, width)
        count = LongLong(rows * width // _VECTOR_WIDTH)
        blocks = -(-count // _GATE_THREADS)
        self._kernels.run("gate", blocks, _GATE_THREADS, states, output, count, width)
        return output

    def unit_rows(
        self, states: Tensor, dtype: torch.dtype, indices: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        # The mean of states is float32, and the kernels are compiled for the model's dtype.
        if states.dtype is not self._dtype or not _can_fuse(states):
            return self._otherwise.unit_rows(states, dtype, indices)
        rows, width = len(states if indices is None else indices), states.shape[1]
        output = states.new_empty(rows, width, dtype=dtype)
        lengths = states.new_empty(rows, dtype=torch.float32)
        self._kernels.run(
            "unit_rows", rows, _count_threads(width), states, indices, output, lengths,
            MIN_ROW_LENGTH, int(dtype is torch.float16), width,
        )  # fmt: skip
        return output, lengths

    def float8_rows(self, states: Tensor, activation: str | None = None) -> Float8Rows:
        fits = states.dtype is self._dtype and _can_fuse(states)
        if not fits or activation not in {None, "gelu"}:
            return self._otherwise.float8_rows(states, activation)
        rows, width = states.shape
        output = torch.empty_like(states, dtype=torch.float8_e4m3fn)
        scales = states.new_empty(rows, 1, dtype=torch.float32)
        self._kernels.run(
            "float8_rows", rows, _count_threads(-(-width // _FLOAT8_VECTORS)),
            states, output, scales, int(activation is not None), width,
        )  # fmt: skip
        return output, scales


def _can_fuse(states: Tensor, *others: Tensor) -> bool:
    """Whether the kernels take rows like `states` `[T, width]`, and the other tensors."""
    width = states.shape[1]
    fits = len(states) > 0 and width % _VECTOR_WIDTH == 0 and width <= _MAX_WIDTH
    tensors = states, *others
    return fits and all(tensor.dtype is states.dtype and _is_aligned(tensor) for tensor in tensors)


def _is_aligned(tensor: Tensor) -> bool:
    """Whether a tensor has no gaps and starts where a thread can load eight numbers at once."""
    offset = tensor.storage_offset() * tensor.element_size()
    return tensor.is_contiguous() and offset % _ALIGNMENT == 0


def _count_threads(width: int) -> int:
    return -(-width // (_VECTOR_WIDTH * _WARP)) * _WARP


class LongLong(int):
    """An integer that is passed to a kernel as `long long`."""


class CudaKernels:
    """The kernels for one dtype on one GPU; raises `RuntimeError` if they cannot be compiled."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        from cuda.bindings import driver  # noqa: PLC0415 - only builds for CUDA have it

        self._device = device
        self._driver = driver
        # The types of each kernel's arguments, which are the same at every call.
        self._types: dict[str, tuple[Any, ...]] = {}
        binary = compile_cuda(torch.cuda.get_device_capability(device), dtype)
        with torch.cuda.device(device):
            self._index = torch.cuda.current_device()
            # Makes the device's context current in this thread; an allocation that PyTorch serves
            # from its cache does not.
            torch.cuda.current_stream(device).synchronize()
            (module,) = _check_status(driver.cuModuleLoadData(binary))
            self._functions = {
                name: _check_status(driver.cuModuleGetFunction(module, name.encode()))[0]
                for name in NAMES
            }

    def run(self, name: str, blocks: int, threads: int, *arguments: Tensor | float | None) -> None:
        """Launch a kernel on the current stream; None is a null pointer."""
        values = tuple(
            argument.data_ptr() if isinstance(argument, Tensor) else argument or 0
            for argument in arguments
        )
        types = self._types.get(name)
        if types is None:
            types = self._types[name] = tuple(map(_type_of, arguments))
        device = torch.cuda.current_device()
        # Changing the device and back takes as long as all the rest.
        guard = nullcontext() if device == self._index else torch.cuda.device(self._index)
        with guard:
            stream = torch._C._cuda_getCurrentRawStream(self._index)  # noqa: SLF001
            launched = self._driver.cuLaunchKernel(
                self._functions[name], blocks, 1, 1, threads, 1, 1, 0, stream, (values, types), 0
            )
            if launched[0] != 0:
                # Raises PyTorch's error if the device has failed for good.
                torch.cuda.synchronize(self._device)
            _check_status(launched)


def _type_of(argument: Tensor | float | None) -> Any:
    if argument is None or isinstance(argument, Tensor):
        return ctypes.c_void_p
    if isinstance(argument, LongLong):
        return ctypes.c_longlong
    return ctypes.c_float if isinstance(argument, float) else ctypes.c_int


@cache
def load_kernels(device: torch.device, dtype: torch.dtype) -> CudaKernels | None:
    """Compile and load the kernels; log a warning and return None if that fails."""
    try:
        return CudaKernels(device, dtype)
    except (ImportError, OSError, RuntimeError) as error:
        log.warning("cuda_kernels_not_compiled", reason=str(error) or type(error).__name__)
        return None


def compile_cuda(capability: tuple[int, int], dtype: torch.dtype) -> bytes:
    """Compile the kernels to machine code for GPUs of a compute capability."""
    from cuda.bindings import nvrtc  # noqa: PLC0415 - only builds for CUDA have it

    major, minor = capability
    options = [f"--gpu-architecture=sm_{major}{minor}".encode(), f"-D{_MACROS[dtype]}".encode()]
    (program,) = _check_status(
        nvrtc.nvrtcCreateProgram(SOURCE.read_bytes(), SOURCE.name.encode(), 0, [], [])
    )
    try:
        _check_status(nvrtc.nvrtcCompileProgram(program, len(options), options))
        (size,) = _check_status(nvrtc.nvrtcGetCUBINSize(program))
        binary = bytes(size)
        _check_status(nvrtc.nvrtcGetCUBIN(program, binary))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return binary


def _check_status(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the results of a call of CUDA; raises `RuntimeError` if its status is an error."""
    status, *values = result
    if status != 0:
        raise RuntimeError(f"CUDA returned {status.name}")
    return tuple(values)
