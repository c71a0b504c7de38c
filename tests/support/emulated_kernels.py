"""Runs the CUDA kernels on a CPU, compiled as C++, for their results and not their speed."""

import ctypes
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from smart_embedder.kernels.cuda import _MACROS, SOURCE, _type_of

CAN_EMULATE = bool(shutil.which("g++") and torch.cpu.get_capabilities().get("avx2"))
# Flags with which the kernels check themselves, for scripts/check_sanitizers.sh.
_CHECKS = os.environ.get("CUDA_KERNEL_CHECKS", "").split()
_EMULATOR = Path(__file__).with_name("cuda_emulator.cpp")


class EmulatedKernels:
    """Implements `smart_embedder.kernels.cuda.CudaKernels` for tensors on the host."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def run(self, name: str, blocks: int, threads: int, *arguments: Tensor | float | None) -> None:
        values = (
            _type_of(argument)(argument.data_ptr() if isinstance(argument, Tensor) else argument)
            for argument in arguments
        )
        getattr(_library(self._dtype), f"run_{name}")(blocks, threads, *values)


@cache
def _library(dtype: torch.dtype) -> ctypes.CDLL:
    """Compile the kernels for a number format, once, because it takes seconds."""
    defined = [f"-D{_MACROS[dtype]}", f'-DSOURCE="{SOURCE}"']
    with TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.so"
        subprocess.run(
            ["g++", "-O1", "-mf16c", "-shared", "-fPIC", *_CHECKS, *defined, _EMULATOR, "-o", path],
            check=True,
        )
        return ctypes.CDLL(str(path))
