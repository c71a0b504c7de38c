"""The kernels for ARM on an emulated processor: what they compute, not how fast.

The compiler's package and qemu-user are all that is needed.
"""

import ctypes
import hashlib
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch

from smart_embedder.models.ops.build import (
    AARCH64,
    COMPILER,
    FOLDER,
    Compiler,
    InstructionSet,
    explain,
)
from smart_embedder.models.ops.native import _ARGUMENTS
from tests.support.server import REPOSITORY

QEMU = shutil.which("qemu-aarch64")
# The least processors of qemu 7.2 that have them.
_PROCESSORS = {"neon_matrix": "max", "neon_dot": "neoverse-n1"}
_SOURCE = Path(__file__).with_name("arm_emulator.c")
_BUILT = REPOSITORY / "build"
# Flags with which the kernels check themselves, for scripts/check_sanitizers.sh.
_CHECKS = os.environ.get("ARM_KERNEL_CHECKS", "").split()
_NAMES = [f"{name}_{each.name}" for each in AARCH64.sets for name in _ARGUMENTS]
_KERNELS = " ".join(f"K({name})" for name in _NAMES)
_OPTIONS = ["-std=gnu17", "-O2", "-ffreestanding", f"-I{FOLDER}", f"-DKERNELS={_KERNELS}"]
# As in arm_emulator.c.
_WHOLE, _FLOATS = 24, 2
_CALL = struct.Struct(f"<q{_WHOLE}q{_WHOLE}q{_FLOATS}f")
# Bytes of a number of each of the kernels' formats.
_BYTES = (4, 2, 1)


def built_program() -> Path:
    """The kernels in a program, which is compiled once for the sources and flags that it is of.

    Skip where the compiler cannot be fetched.
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
        # The headers of a C library; the program has none.
        compiler = _compiler(folder, "musl")
        try:
            compiler.fetch()
        except subprocess.SubprocessError as error:
            pytest.skip(f"the compiler cannot be fetched: {explain(error)}")
        compiler.run(*_OPTIONS, "-c", str(_SOURCE), "-o", str(folder / "emulator.o"))
        kernels = (each for each in compiler.compile_kernels() if "threads" not in Path(each).name)
        linked = [str(folder / "emulator.o"), *kernels, "-o", str(folder / "linked")]
        _compiler(folder, "none").run("-nostdlib", "-static", *linked)
        program.parent.mkdir(exist_ok=True)
        # Beside its place, so that it comes there in one step.
        copied = shutil.copy(folder / "linked", program.with_suffix(f".{os.getpid()}"))
        Path(copied).replace(program)


def _compiler(folder: Path, library: str) -> Compiler:
    return Compiler(
        folder / "compiler", folder, replace(AARCH64, target=f"aarch64-linux-{library}"), _CHECKS
    )


class EmulatedLibrary:
    """As `smart_embedder.models.ops.native.Library`, for a processor of another architecture."""

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
        """Call a kernel with copies of the memory at its addresses; take over what it changed."""
        typed = list(zip(_ARGUMENTS[name], arguments, strict=True))
        floats = [value for kind, value in typed if kind is ctypes.c_float]
        whole = [(kind, value or 0) for kind, value in typed if kind is not ctypes.c_float]
        sizes = iter(_sizes(name, arguments))
        memory = {
            place: next(sizes) * bool(value)
            for place, (kind, value) in enumerate(whole)
            if kind is ctypes.c_void_p
        }
        addresses = [value for _, value in whole]
        self._send(name, addresses, memory, floats)
        for place, size in memory.items():
            self._receive(addresses[place], size)

    def _send(
        self, name: str, whole: list[int], memory: dict[int, int], floats: list[float]
    ) -> None:
        """`memory` has the bytes at those whole numbers that are addresses."""
        values = [*whole, torch.get_num_threads(), *[0] * _WHOLE][:_WHOLE]
        bytes_at = [memory.get(place, -1) for place in range(_WHOLE)]
        kernel = _NAMES.index(f"{name}_{self.instructions.name}")
        header = _CALL.pack(kernel, *values, *bytes_at, *[*floats, 0.0, 0.0][:_FLOATS])
        parts = (ctypes.string_at(whole[place], size) for place, size in memory.items())
        self._process.stdin.write(b"".join([header, *parts]))
        self._process.stdin.flush()

    def _receive(self, address: int, size: int) -> None:
        received = self._process.stdout.read(size)
        if len(received) < size:
            raise RuntimeError(f"the kernel was killed: {self._process.wait()}")
        # What is read only, as weights in a mapped file, is never written.
        if received != ctypes.string_at(address, size):
            ctypes.memmove(address, received, size)


def _of_attention(call: SimpleNamespace) -> tuple[int, ...]:
    last = call.offsets + 8 * call.sequences
    tokens = ctypes.c_int64.from_address(last).value

    def span(token: int, head: int, heads: int) -> int:
        return call.size * ((tokens - 1) * token + (heads - 1) * head + call.width)

    keys = span(call.key_token, call.key_head, call.heads // call.group)
    query = span(call.query_token, call.query_head, call.heads)
    output = span(call.output_token, call.output_head, call.heads)
    return query, keys, keys, output, 8 * (call.sequences + 1)


def _of_gemm(call: SimpleNamespace) -> tuple[int, ...]:
    left, right = call.size * call.rows * call.depth, call.size * call.columns * call.depth
    output = _BYTES[call.output_kind] * ((call.rows - 1) * call.stride + call.columns)
    return left, right, *[4 * call.rows] * 2, *[4 * call.columns] * 3, output


def _of_rotary(call: SimpleNamespace) -> tuple[int, ...]:
    heads = call.heads * call.width
    states, embedding = (call.rows - 1) * call.stride + heads, 4 * call.rows * call.width // 2
    return call.size * states, call.size * heads, embedding, embedding


_ATTENTION = (
    "query key value output kind query_token query_head key_token key_head output_token "
    "output_head offsets sequences heads group width scale before after"
)
_GEMM = (
    "left right row_scale minimum scale sums bias output kind output_kind rows depth columns "
    "stride activation"
)
# Each kernel's arguments, and the bytes at its addresses. `size` is that of a number of its `kind`,
# and `matrix` the product of `rows` and `width`.
_CALLS: dict[str, tuple[str, Callable[[SimpleNamespace], tuple[int, ...]]]] = {
    "attention": (
        _ATTENTION,
        _of_attention,
    ),
    "gemm": (
        _GEMM,
        _of_gemm,
    ),
    "add_norm": (
        "states residual kind weight bias epsilon rows width",
        lambda call: (*[call.size * call.matrix] * 2, *[4 * call.width] * 2),
    ),
    "rms_norm": (
        "states weight output kind epsilon rows width",
        lambda call: (call.size * call.matrix, call.size * call.width, call.size * call.matrix),
    ),
    "rotary": (
        "states weight kind cosines sines epsilon rows stride heads width",
        _of_rotary,
    ),
    "gate": (
        "states output kind rows width activation",
        lambda call: (2 * call.size * call.matrix, call.size * call.matrix),
    ),
    "quantize_rows": (
        "states kind factors offsets repeated values scale minimum rows width repeats",
        lambda call: (
            call.size * call.matrix, 4 * call.width, 4 * (call.width + call.repeats),
            4 * call.repeats, call.matrix + call.rows * call.repeats, *[4 * call.rows] * 2,
        ),
    ),
    "dequantize": (
        "product row_scale minimum sums bias output output_kind rows width activation",
        lambda call: (
            4 * call.matrix, *[4 * call.rows] * 2, *[4 * call.width] * 2,
            _BYTES[call.output_kind] * call.matrix,
        ),
    ),
}  # fmt: skip


def _sizes(name: str, arguments: Sequence[float | None]) -> tuple[int, ...]:
    """Bytes of the memory at each address of a call."""
    names, sizes = _CALLS[name]
    call = SimpleNamespace(**dict(zip(names.split(), arguments, strict=True)))
    call.size = _BYTES[getattr(call, "kind", 0)]
    call.matrix = getattr(call, "rows", 0) * getattr(call, "width", 0)
    return sizes(call)
