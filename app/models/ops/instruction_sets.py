"""The sets of instructions that the kernels in C are compiled for, and which processor has them."""

from collections.abc import Container, Iterator
from dataclasses import dataclass

MAX_INT8 = 127
# AVX2 without VNNI sums the products of two bytes in 16 bits: 2 x 255 x 63 fits them.
MAX_INT8_IN_PAIRS = 63


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """One that the kernels are compiled for.

    `name` ends the names of its functions. `processor` is what the compiler calls the least one
    that has it. `needs` are its features by the names that Linux and PyTorch share. `tile` is as
    TILE in tile.h. `int8_weight_limit` is the largest absolute value that an 8-bit weight may have.
    """

    name: str
    processor: str
    needs: tuple[str, ...]
    tile: int
    int8_weight_limit: int = MAX_INT8


# Those that compute faster first.
X86_64 = (
    InstructionSet(
        "avx512_bf16",
        "x86_64_v4+avx512bf16+avx512vnni",
        ("avx512_bf16", "avx512_vnni"),
        tile=64,
    ),
    InstructionSet("avx512_vnni", "x86_64_v4+avx512vnni", ("avx512_vnni",), tile=64),
    InstructionSet("avx_vnni", "x86_64_v3+avxvnni", ("avx2", "avx_vnni"), tile=16),
    InstructionSet("avx2", "x86_64_v3", ("avx2",), 16, MAX_INT8_IN_PAIRS),
)


def runnable(features: Container[str]) -> Iterator[InstructionSet]:
    """Those that a processor with `features` runs, the fastest first."""
    return (each for each in X86_64 if all(name in features for name in each.needs))
