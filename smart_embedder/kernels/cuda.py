"""The operations on NVIDIA GPUs: attention over packed sequences, and kernels in CUDA.

The kernels are compiled at the start, for the GPU and one dtype; where they cannot be, PyTorch's
operators compute the same.
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
    SHORTEST_ROW,
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

# The name of the operations by PyTorch's own operators for these GPUs.
CUDA = "cuda"
SOURCE = Path(__file__).parent / "csrc" / "row_ops.cu"
# Those that are operations of a backend, and the kernel that is a part of one.
_OPERATIONS = ("embed", "add_norm", "rms_norm", "rotary", "gate", "unit_rows", "float8_rows")
NAMES = (*_OPERATIONS, "gelu")
_MACROS = {torch.float16: "FLOAT16", torch.bfloat16: "BFLOAT16", torch.float32: "FLOAT32"}
# As in row_ops.cu: a thread holds so many numbers, and a block has at most 1,024 threads.
_VECTOR_WIDTH = 8
_TIMES = 4  # in `float8_rows`
_WARP = 32
_MAX_WIDTH = 8192
_MAX_WARPS = 32
_GATE_THREADS = 256
_ALIGNMENT = 16
# The major number of its compute capability.
_HOPPER = 9


def cuda_backend(device: torch.device, dtype: torch.dtype) -> Backend:
    """PyTorch's operators, attention over packed sequences, and products with their residual."""
    # Of large sums in half precision the last bits would depend on how cuBLAS divides the work.
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
    """With FlashAttention 3 as the first to be proven, where its package is installed.

    By the package itself: `torch.nn.attention.activate_flash_attention_impl` would put the same
    kernel in the place of PyTorch's for the whole process, so that none could be compared.
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
    """The product is added to its residual as it is computed."""
    if layer.bias is not None:
        return make_add_linear(linear)(layer)
    weight = layer.weight.detach().t()
    return lambda states, residual: residual.addmm_(states, weight)


def _float8_product(
    rows: Float8Rows, weights: Float8Rows, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """By the tensor cores, whose sums are less exact by far than the numbers are rounded."""
    (values, scales), (columns, others) = rows, weights
    product: Tensor = torch._scaled_mm(  # noqa: SLF001
        values, columns.t(), scales, others.t(), bias, out_dtype=dtype, use_fast_accum=True
    )
    return product


def fused_backend(kernels: "CudaKernels", dtype: torch.dtype, otherwise: Backend) -> Backend:
    """The operations between two matrix products, each in one pass, in front of `otherwise`."""
    fused = _FusedOperations(kernels, dtype, otherwise)
    backend = otherwise.prefer("fused", **{name: getattr(fused, name) for name in _OPERATIONS})
    # In float32 that of the kernel would not be exact enough.
    return backend if dtype is torch.float32 else backend.prefer("fused", linear=fused.linear)


class _FusedOperations:
    """Those of `Backend`, with sums in float32; `otherwise` has what a kernel does not take."""

    def __init__(self, kernels: "CudaKernels", dtype: torch.dtype, otherwise: Backend) -> None:
        self._kernels = kernels
        self._dtype = dtype
        self._otherwise = otherwise

    def linear(self, layers: Sequence[nn.Linear], activation: str | None = None) -> Linear:
        """GELU in four fifths of the time of PyTorch's, which is bound by its arithmetic."""
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
        """Where a table has no such row, the row is NaN."""
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
        # The mean of states, which is float32, has another type than the kernels are compiled for.
        if states.dtype is not self._dtype or not _can_fuse(states):
            return self._otherwise.unit_rows(states, dtype, indices)
        rows, width = len(states if indices is None else indices), states.shape[1]
        output = states.new_empty(rows, width, dtype=dtype)
        lengths = states.new_empty(rows, dtype=torch.float32)
        self._kernels.run(
            "unit_rows", rows, _count_threads(width), states, indices, output, lengths,
            SHORTEST_ROW, int(dtype is torch.float16), width,
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
            "float8_rows", rows, _count_threads(-(-width // _TIMES)),
            states, output, scales, int(activation is not None), width,
        )  # fmt: skip
        return output, scales


def _can_fuse(states: Tensor, *others: Tensor) -> bool:
    width = states.shape[1]
    fits = len(states) > 0 and width % _VECTOR_WIDTH == 0 and width <= _MAX_WIDTH
    every = states, *others
    return fits and all(each.dtype is states.dtype and _is_aligned(each) for each in every)


def _is_aligned(tensor: Tensor) -> bool:
    """Whether its rows begin where a thread can read eight numbers at once."""
    offset = tensor.storage_offset() * tensor.element_size()
    return tensor.is_contiguous() and offset % _ALIGNMENT == 0


def _count_threads(width: int) -> int:
    return -(-width // (_VECTOR_WIDTH * _WARP)) * _WARP


class LongLong(int):
    """A number that a kernel takes as `long long`."""


class CudaKernels:
    """The kernels for numbers of one type; raises `RuntimeError` where they cannot be compiled."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        from cuda.bindings import driver  # noqa: PLC0415 - only builds for CUDA have it

        self._device = device
        self._driver = driver
        # Of each kernel's arguments: they have the same ones at every call.
        self._types: dict[str, tuple[Any, ...]] = {}
        binary = compile_cuda(torch.cuda.get_device_capability(device), dtype)
        with torch.cuda.device(device):
            self._index = torch.cuda.current_device()
            # Makes the device's context the current one of this thread, as no allocation does
            # that PyTorch serves from memory that it has.
            torch.cuda.current_stream(device).synchronize()
            (module,) = _check_status(driver.cuModuleLoadData(binary))
            self._functions = {
                name: _check_status(driver.cuModuleGetFunction(module, name.encode()))[0]
                for name in NAMES
            }

    def run(self, name: str, blocks: int, threads: int, *arguments: Tensor | float | None) -> None:
        """Launch a kernel on the current stream; None is a null pointer."""
        values = tuple(
            each.data_ptr() if isinstance(each, Tensor) else each or 0 for each in arguments
        )
        types = self._types.get(name)
        if types is None:
            types = self._types[name] = tuple(_type_of(each) for each in arguments)
        device = torch.cuda.current_device()
        # To change it and back takes as long as all the rest.
        guard = nullcontext() if device == self._index else torch.cuda.device(self._index)
        with guard:
            stream = torch._C._cuda_getCurrentRawStream(self._index)  # noqa: SLF001
            launched = self._driver.cuLaunchKernel(
                self._functions[name], blocks, 1, 1, threads, 1, 1, 0, stream, (values, types), 0
            )
            if launched[0] != 0:
                # Raises PyTorch's own error if the device has failed for good.
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
    """The kernels; None, with a warning, if they cannot be compiled."""
    try:
        return CudaKernels(device, dtype)
    except (ImportError, OSError, RuntimeError) as error:
        log.warning("cuda_kernels_not_compiled", reason=str(error) or type(error).__name__)
        return None


def compile_cuda(capability: tuple[int, int], dtype: torch.dtype) -> bytes:
    """Machine code for GPUs of a compute capability."""
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
    """The results of a call of CUDA, without its status."""
    status, *values = result
    if status != 0:
        raise RuntimeError(f"CUDA says {status.name}")
    return tuple(values)
