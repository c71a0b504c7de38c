"""Runs the kernels for ARM on an emulated processor, for their results and not their speed.

It needs the compiler's package and qemu-user.
"""

import ctypes
import hashlib
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest
import torch

from smart_embedder.kernels.build import (
    AARCH64,
    COMPILER,
    FOLDER,
    Compiler,
    InstructionSet,
    explain_error,
)
from smart_embedder.kernels.native import _ARGUMENTS
from tests.support.server import REPOSITORY

QEMU = shutil.which("qemu-aarch64")
# The smallest processors of qemu 7.2 with these instructions.
_PROCESSORS = {"neon_matrix": "max", "neon_dot": "neoverse-n1"}
_SOURCE = Path(__file__).with_name("arm_emulator.c")
_BUILT = REPOSITORY / "build"
# Flags with which the kernels check themselves, for scripts/check_sanitizers.sh.
_CHECKS = os.environ.get("ARM_KERNEL_CHECKS", "").split()
_NAMES = [f"{name}_{instructions.name}" for instructions in AARCH64.sets for name in _ARGUMENTS]
_KERNELS = " ".join(f"K({name})" for name in _NAMES)
_OPTIONS = ["-std=gnu17", "-O2", "-ffreestanding", f"-I{FOLDER}", f"-DKERNELS={_KERNELS}"]
# The layout of a call in arm_emulator.c.
_WHOLE, _FLOATS = 24, 2
_CALL = struct.Struct(f"<q{_WHOLE}q{_WHOLE}q{_FLOATS}f")


def build_program() -> Path:
    """Return a program with the kernels, compiled once for each state of sources and flags.

    Skips the test if the compiler cannot be fetched.
    """
    digest = hashlib.sha256(" ".join([*_OPTIONS, *_CHECKS]).encode())
    for file in (_SOURCE, *sorted(FOLDER.glob("*.[ch]")), COMPILER):
        digest.update(file.read_bytes())
    program = _BUILT / f"arm-kernels-{digest.hexdigest()[:16]}"
    if not program.exists():
        _build(program)
        for other in set(_BUILT.glob("arm-kernels-*")) - {program}:
            other.unlink(missing_ok=True)
    return program


def _build(program: Path) -> None:
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        # The headers of a C library, which the program is not linked with.
        compiler = _compiler(folder, "musl")
        try:
            compiler.fetch()
        except subprocess.SubprocessError as error:
            pytest.skip(f"the compiler cannot be fetched: {explain_error(error)}")
        compiler.run(*_OPTIONS, "-c", str(_SOURCE), "-o", str(folder / "emulator.o"))
        kernels = (file for file in compiler.compile_kernels() if "threads" not in Path(file).name)
        linked = [str(folder / "emulator.o"), *kernels, "-o", str(folder / "linked")]
        _compiler(folder, "none").run("-nostdlib", "-static", *linked)
        program.parent.mkdir(exist_ok=True)
        # Copied beside its target and renamed, so that other processes see a whole file.
        copied = shutil.copy(folder / "linked", program.with_suffix(f".{os.getpid()}"))
        Path(copied).replace(program)


def _compiler(folder: Path, library: str) -> Compiler:
    return Compiler(
        folder / "compiler", folder, replace(AARCH64, target=f"aarch64-linux-{library}"), _CHECKS
    )


class EmulatedLibrary:
    """Implements `smart_embedder.kernels.native.Library` with an emulated processor."""

    def __init__(self, program: Path, instructions: InstructionSet) -> None:
        self.instructions = instructions
        self._process = subprocess.Popen(
            [QEMU or "", "-cpu", _PROCESSORS[instructions.name], program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def run(self, name: str, *arguments: float | None) -> None:
        """Call a kernel with copies of the memory at its addresses, and copy changes back."""
        typed = list(zip(_ARGUMENTS[name], arguments, strict=True))
        floats = [value for kind, value in typed if kind is ctypes.c_float]
        whole = [(kind, value or 0) for kind, value in typed if kind is not ctypes.c_float]
        sent = {
            index: ctypes.string_at(value, self._size(value, arguments) if value else 0)
            for index, (kind, value) in enumerate(whole)
            if kind is ctypes.c_void_p
        }
        values = [*[value for _, value in whole], torch.get_num_threads(), *[0] * _WHOLE][:_WHOLE]
        sizes = [len(sent[index]) if index in sent else -1 for index in range(_WHOLE)]
        kernel = _NAMES.index(f"{name}_{self.instructions.name}")
        header = _CALL.pack(kernel, *values, *sizes, *[*floats, 0.0, 0.0][:_FLOATS])
        self._process.stdin.write(b"".join([header, *sent.values()]))
        self._process.stdin.flush()
        for index, before in sent.items():
            received = self._process.stdout.read(len(before))
            if len(received) < len(before):
                raise RuntimeError(f"the kernel was killed: {self._process.wait()}")
            # Memory that only is read may be mapped read-only, as weights in a file.
            if received != before:
                ctypes.memmove(values[index], received, len(received))

    def _size(self, address: int, arguments: Sequence[float | None]) -> int:
        """Return the bytes to the end of a tensor's memory; offsets of attention have no tensor."""
        sequences = int(arguments[12] or 0) if len(arguments) > 12 else 0
        return _ends.get(address, address + 8 * (sequences + 1)) - address


# The end of the memory that an address lies in, by the address.
_ends: dict[int, int] = {}
_data_ptr = torch.Tensor.data_ptr


def _recording_data_ptr(tensor: torch.Tensor) -> int:
    storage, address = tensor.untyped_storage(), _data_ptr(tensor)
    _ends[address] = storage.data_ptr() + storage.nbytes()
    return address


@contextmanager
def emulated_library(program: Path, instructions: InstructionSet) -> Iterator[EmulatedLibrary]:
    """Run the kernels in the block; `Tensor.data_ptr` records addresses for the copies."""
    emulated = EmulatedLibrary(program, instructions)
    try:
        with patch.object(torch.Tensor, "data_ptr", _recording_data_ptr):
            yield emulated
    finally:
        emulated.close()
