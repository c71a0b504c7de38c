"""The library of kernels: loaded once, its functions called with the addresses of tensors."""

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor

from app.models.ops.build import library_path
from app.models.ops.instruction_sets import (
    AARCH64,
    InstructionSet,
    architecture_here,
    arm_features,
)

log = structlog.get_logger(__name__)

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
# As the C files declare them; each function's last argument, the number of threads, is left out.
_ARGUMENTS: dict[str, list[Any]] = {
    "attention": [_POINTER] * 4 + [_INT] + [_LONG] * 6 + [_POINTER] + [_LONG] * 4 + [_FLOAT, _INT],
    "gemm": [_POINTER] * 8 + [_INT] * 2 + [_LONG] * 4 + [_INT],
    "add_norm": [_POINTER] * 2 + [_INT] + [_POINTER] * 2 + [_FLOAT] + [_LONG] * 2,
    "rms_norm": [_POINTER] * 3 + [_INT, _FLOAT] + [_LONG] * 2,
    "rotary": [_POINTER] * 2 + [_INT] + [_POINTER] * 2 + [_FLOAT] + [_LONG] * 4,
    "gate": [_POINTER] * 2 + [_INT] + [_LONG] * 2,
    "quantize_rows": [_POINTER, _INT] + [_POINTER] * 6 + [_LONG] * 3,
    "dequantize": [_POINTER] * 6 + [_INT] + [_LONG] * 2 + [_INT],
}
# As `Format` in vector.h.
FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}
# Most kernels compute this many numbers of a row at a time.
STEP = 16


class Library:
    """Functions of the library at `path`; raises `OSError` where it cannot be loaded."""

    def __init__(self, path: str, instructions: InstructionSet) -> None:
        _share_threads()
        library = ctypes.CDLL(path)
        self.instructions = instructions
        self._functions = {
            name: getattr(library, f"{name}_{instructions.name}") for name in _ARGUMENTS
        }
        for name, function in self._functions.items():
            function.argtypes = [*_ARGUMENTS[name], _INT]
            function.restype = None

    def run(self, name: str, *arguments: float | None) -> None:
        """Call a function on as many threads as PyTorch uses."""
        self._functions[name](*arguments, torch.get_num_threads())


def _share_threads() -> None:
    """Let other libraries use the OpenMP that PyTorch brought and loaded.

    Its builds for x86-64 do so themselves, those for ARM do not.
    """
    for brought in Path(torch.__file__).parent.glob("lib/libgomp*"):
        ctypes.CDLL(str(brought), os.RTLD_NOLOAD | os.RTLD_GLOBAL | os.RTLD_LAZY)


def runnable_here() -> list[InstructionSet]:
    """The sets of instructions that this processor has, the fastest first."""
    architecture = architecture_here()
    if architecture is AARCH64:
        return list(architecture.runnable(arm_features()))
    capabilities = torch.cpu.get_capabilities()
    features = {name for name, has in capabilities.items() if has is True}
    return list(architecture.runnable(features))


@cache
def load_library(instructions: InstructionSet | None = None) -> Library | None:
    """The kernels, if they are built: for the fastest instructions of this processor, or others."""
    path, sets = library_path(), [instructions] if instructions else runnable_here()
    if not sets:
        return None
    if not path.exists():
        log.info("kernels_not_built", build="python -m app.models.ops.build")
        return None
    try:
        return Library(str(path), sets[0])
    except OSError as error:
        log.warning("kernels_not_loaded", reason=str(error))
        return None


def address(tensor: Tensor, dtype: torch.dtype) -> int:
    """The address of a tensor; raises `ValueError` for a layout that kernels do not read."""
    if tensor.dtype is not dtype or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(f"a kernel needs {dtype} numbers without gaps, not {tensor.dtype}")
    return tensor.data_ptr()
