"""The instruction sets for which the kernels in C are compiled, and their processors."""

import ctypes
import platform
from collections.abc import Container, Iterator
from dataclasses import dataclass

MAX_INT8 = 127
# AVX2 without VNNI sums the products of two bytes in 16 bits: 2 x 255 x 63 fits them.
MAX_INT8_IN_PAIRS = 63


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """One that the kernels are compiled for.

    `name` ends the names of its functions. `processor` is the compiler's name of the least
    processor that has it. `needs` are its features by Linux's names, which on x86-64 are also
    PyTorch's. `tile` is as TILE in tile.h, `matrix_rows` as MATRIX_ROWS in vector.h.
    `int8_weight_limit` is the largest absolute value that an 8-bit weight may have.
    """

    name: str
    processor: str
    needs: tuple[str, ...]
    tile: int
    int8_weight_limit: int = MAX_INT8
    matrix_rows: int = 1


@dataclass(frozen=True, slots=True)
class Architecture:
    """Processors that one library of kernels is for.

    `machine` is Linux's name of them. `target` is the compiler's, with the C library of PyTorch's
    own builds or any newer one, and `flags` are for it. Of `sets` the fastest come first.
    """

    machine: str
    target: str
    flags: tuple[str, ...]
    sets: tuple[InstructionSet, ...]

    def runnable(self, features: Container[str]) -> Iterator[InstructionSet]:
        """The sets that a processor with `features` runs, the fastest first."""
        return (each for each in self.sets if all(name in features for name in each.needs))


X86_64 = Architecture(
    "x86_64",
    "x86_64-linux-gnu.2.28",
    ("-mprefer-vector-width=512",),
    (
        InstructionSet(
            "avx512_bf16",
            "x86_64_v4+avx512bf16+avx512vnni",
            ("avx512_bf16", "avx512_vnni"),
            tile=64,
        ),
        InstructionSet("avx512_vnni", "x86_64_v4+avx512vnni", ("avx512_vnni",), tile=64),
        InstructionSet("avx_vnni", "x86_64_v3+avxvnni", ("avx2", "avx_vnni"), tile=16),
        InstructionSet("avx2", "x86_64_v3", ("avx2",), 16, MAX_INT8_IN_PAIRS),
    ),
)
AARCH64 = Architecture(
    "aarch64",
    "aarch64-linux-gnu.2.28",
    (),
    (
        InstructionSet(
            "neon_matrix",
            "generic+v8_2a+dotprod+bf16+i8mm",
            ("asimddp", "bf16", "i8mm"),
            tile=16,
            matrix_rows=2,
        ),
        InstructionSet("neon_dot", "generic+v8_2a+dotprod", ("asimddp",), tile=16),
    ),
)
ARCHITECTURES = {each.machine: each for each in (X86_64, AARCH64)}
# Where Linux tells a process what the processor has (asm/hwcap.h): a vector of bits, and a bit.
_HWCAP, _HWCAP2 = 16, 26
_ARM_FEATURES = {"asimddp": (_HWCAP, 20), "i8mm": (_HWCAP2, 13), "bf16": (_HWCAP2, 14)}


def architecture_here() -> Architecture:
    """The architecture of this machine; x86-64 for an unknown one, where no set is runnable."""
    return ARCHITECTURES.get(platform.machine(), X86_64)


def arm_features() -> set[str]:
    """The features of this Linux machine's 64-bit ARM processor that kernels may need."""
    read = ctypes.CDLL(None).getauxval
    read.argtypes, read.restype = [ctypes.c_ulong], ctypes.c_ulong
    return {name for name, (vector, bit) in _ARM_FEATURES.items() if read(vector) >> bit & 1}
