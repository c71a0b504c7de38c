"""The kernels of `csrc/row_ops.cu`, compiled at the start for the present GPU.

NVRTC compiles them, called by `cuda.bindings`; PyTorch's builds for CUDA on Linux depend on both.
Triton would need a C compiler and Python's headers on the machine; NVRTC needs neither, and no
header of CUDA.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor

log = structlog.get_logger(__name__)

SOURCE = Path(__file__).parent / "csrc" / "row_ops.cu"
NAMES = ("embed", "add_norm", "rms_norm", "rotary", "gate", "unit_rows")
_MACROS = {torch.float16: "FLOAT16", torch.bfloat16: "BFLOAT16", torch.float32: "FLOAT32"}


class Wide(int):
    """A number that a kernel takes as `long long`."""


class CudaKernels:
    """The kernels for numbers of one type; raises `RuntimeError` where they cannot be compiled."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        from cuda.bindings import driver  # noqa: PLC0415 - only builds for CUDA have it

        self._device = device
        self._driver = driver
        binary = compile_for(torch.cuda.get_device_capability(device), dtype)
        with torch.cuda.device(device):
            torch.empty(1, device=device)  # Makes the device's context the current one.
            (module,) = _checked(driver.cuModuleLoadData(binary))
            self._functions = {
                name: _checked(driver.cuModuleGetFunction(module, name.encode()))[0]
                for name in NAMES
            }

    def run(self, name: str, blocks: int, threads: int, *arguments: Tensor | float | None) -> None:
        """Launch a kernel on the current stream; None is a null pointer."""
        values = tuple(
            each.data_ptr() if isinstance(each, Tensor) else each or 0 for each in arguments
        )
        types = tuple(_type_of(each) for each in arguments)
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream(self._device).cuda_stream
            launched = self._driver.cuLaunchKernel(
                self._functions[name], blocks, 1, 1, threads, 1, 1, 0, stream, (values, types), 0
            )
            if launched[0] != 0:
                # Raises PyTorch's own error if the device has failed for good.
                torch.cuda.synchronize(self._device)
            _checked(launched)


def _type_of(argument: Tensor | float | None) -> Any:
    if argument is None or isinstance(argument, Tensor):
        return ctypes.c_void_p
    if isinstance(argument, Wide):
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


def compile_for(capability: tuple[int, int], dtype: torch.dtype) -> bytes:
    """Machine code for GPUs of a compute capability."""
    from cuda.bindings import nvrtc  # noqa: PLC0415 - only builds for CUDA have it

    major, minor = capability
    options = [f"--gpu-architecture=sm_{major}{minor}".encode(), f"-D{_MACROS[dtype]}".encode()]
    (program,) = _checked(
        nvrtc.nvrtcCreateProgram(SOURCE.read_bytes(), SOURCE.name.encode(), 0, [], [])
    )
    try:
        _checked(nvrtc.nvrtcCompileProgram(program, len(options), options))
        (size,) = _checked(nvrtc.nvrtcGetCUBINSize(program))
        binary = bytes(size)
        _checked(nvrtc.nvrtcGetCUBIN(program, binary))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return binary


def _checked(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """The results of a call of CUDA, without its status."""
    status, *values = result
    if status != 0:
        raise RuntimeError(f"CUDA says {status.name}")
    return tuple(values)
