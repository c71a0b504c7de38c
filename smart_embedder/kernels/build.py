"""Build the kernels where the processor can run them: `python -m smart_embedder.kernels.build`.

The compiler is a package from the index, fetched for the build and removed again, so that the
library is the same wherever it is built. `--anywhere` ignores the processor, for images that run on
another machine. `--machine aarch64` builds for another architecture.

The exit status is 0 if the library is there or of no use, and 1, with a sentence, if it cannot be
built: the service runs without it, but slower.
"""

import ctypes
import hashlib
import os
import platform
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

MAX_INT8 = 127
# AVX2 without VNNI sums the products of two bytes in 16 bits: 2 x 255 x 63 fits them.
MAX_INT8_IN_PAIRS = 63


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """One that the kernels are compiled for; `name` ends the names of its functions.

    `processor` is the compiler's name of the least that has it. `needs` are its features by Linux's
    names, on x86-64 also PyTorch's. `tile` is as TILE in tile.h, `matrix_rows` as in vector.h.
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


def current_architecture() -> Architecture:
    """The architecture of this machine; x86-64 for an unknown one, where no set is runnable."""
    return ARCHITECTURES.get(platform.machine(), X86_64)


def arm_features() -> set[str]:
    """The features of this Linux machine's 64-bit ARM processor that kernels may need."""
    read = ctypes.CDLL(None).getauxval
    read.argtypes, read.restype = [ctypes.c_ulong], ctypes.c_ulong
    return {name for name, (vector, bit) in _ARM_FEATURES.items() if read(vector) >> bit & 1}


FOLDER = Path(__file__).parent / "csrc"
_COMPILE = (
    *("-std=c17", "-O3", "-Wall", "-Wextra", "-Werror", "-fPIC"),
    # Sums may be computed in any order; what is not a number stays that.
    *("-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros"),
    "-freciprocal-math",
)
_CHECKED = ("-O1", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all")
_STRIP = "-s"
_LINK = ("-shared", _STRIP, "-lm", "-lpthread")
# The other sources are compiled once for each set of instructions.
_SHARED_SOURCE = "threads.c"
COMPILER = FOLDER.parent / "requirements-kernels.txt"
_SECONDS = 600


def library_path(architecture: Architecture | None = None) -> Path:
    """The path of the library of the present sources; by default for this machine.

    A library of other sources, whose functions may have other arguments, has another name.
    """
    flags = (*_COMPILE, *_LINK, str(architecture or current_architecture()))
    digest = hashlib.sha256(" ".join(flags).encode())
    for source in sorted(FOLDER.glob("*.[ch]")):
        digest.update(source.read_bytes())
    return FOLDER / f"kernels-{digest.hexdigest()[:16]}.so"


def main(argv: list[str]) -> int:
    """Build what is missing."""
    parser = ArgumentParser(prog="python -m smart_embedder.kernels.build")
    parser.add_argument("--anywhere", action="store_true", help="whatever the processor is")
    parser.add_argument("--machine", choices=ARCHITECTURES, help="for another machine than this")
    arguments = parser.parse_args(argv)
    architecture = ARCHITECTURES.get(arguments.machine, current_architecture())
    needed = arguments.machine or can_run_kernels(anywhere=arguments.anywhere)
    if library_path(architecture).exists() or not needed:
        return 0
    print("Fetching a compiler of 100 MB for the kernels", flush=True)  # noqa: T201
    try:
        with TemporaryDirectory(prefix="smart-embedder-kernels-") as temporary:
            folder = Path(temporary)
            compiler = Compiler(folder / "compiler", folder, architecture)
            compiler.fetch()
            make_library(compiler)
    except (subprocess.SubprocessError, OSError) as error:
        print(f"The kernels could not be built: {explain_error(error)}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def can_run_kernels(*, anywhere: bool = False) -> bool:
    """Whether this is Linux (with glibc, as PyTorch is) on a processor that fits."""
    architecture = current_architecture()
    if platform.libc_ver()[0] != "glibc" or platform.machine() != architecture.machine:
        return False
    if anywhere:
        return True
    if architecture is AARCH64:
        features = arm_features()
    else:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        features = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    return any(architecture.runnable(features))


class Compiler:
    """The package ziglang in `package`; what it writes goes to `folder`.

    With `checks`, which are flags of sanitizers, what it makes stops at the first error and knows
    its lines. No path of the service has any: see scripts/check_sanitizers.sh.
    """

    def __init__(
        self,
        package: Path,
        folder: Path,
        architecture: Architecture,
        checks: Sequence[str] = (),
    ) -> None:
        self.architecture = architecture
        self.checks = [*_CHECKED, *checks] if checks else []
        self._package = package
        self._folder = folder
        caches = {f"ZIG_{kind}_CACHE_DIR": str(folder / "cache") for kind in ("GLOBAL", "LOCAL")}
        self._environment = {**os.environ, "PYTHONPATH": str(package), **caches}

    def fetch(self) -> None:
        """Get the package from the index."""
        quiet = ["--quiet", "--no-input", "--disable-pip-version-check"]
        safe = ["--no-deps", "--require-hashes", "--only-binary=:all:"]
        what = ["--target", str(self._package), "--requirement", str(COMPILER)]
        _run([sys.executable, "-m", "pip", "install", *quiet, *safe, *what], os.environ)

    def compile_kernels(self) -> list[str]:
        """Object files of all sources, each once for every set of instructions."""
        sets = self.architecture.sets
        commands: dict[str, list[str]] = {}
        for source in sorted(FOLDER.glob("*.c")):
            for each in sets[-1:] if source.name == _SHARED_SOURCE else sets:
                output = str(self._folder / f"{source.stem}-{each.name}.o")
                target = [f"-mcpu={each.processor}", f"-DINSTRUCTIONS={each.name}"]
                flags = [*self.architecture.flags, *target, *_COMPILE, *self.checks]
                commands[output] = [*flags, "-c", str(source), "-o", output]
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            compiled = threads.map(lambda flags: self.run(*flags), commands.values())
            for number, _ in enumerate(compiled, start=1):
                print(f"{number} of {len(commands)} files compiled", flush=True)  # noqa: T201
        return list(commands)

    def run(self, *arguments: str) -> None:
        """Compile or link for the architecture."""
        zig = [sys.executable, "-m", "ziglang", "cc", "-target", self.architecture.target]
        _run([*zig, *arguments], self._environment)


def make_library(compiler: Compiler) -> None:
    """Compile, and put the library in the place of older ones."""
    objects = compiler.compile_kernels()
    library = library_path(compiler.architecture)
    # Beside its place, so that it comes there in one step.
    temporary = library.with_suffix(f".{os.getpid()}")
    try:
        link: tuple[str, ...] = _LINK
        if compiler.checks:  # Whoever loads it brings the functions that these call.
            link = (*(flag for flag in _LINK if flag != _STRIP), "-Wl,-z,undefs")
        compiler.run(*link, *objects, "-o", str(temporary))
        temporary.replace(library)
    finally:
        temporary.unlink(missing_ok=True)
    for other in set(FOLDER.glob("kernels-*.so")) - set(map(library_path, ARCHITECTURES.values())):
        other.unlink(missing_ok=True)


def _run(command: list[str], environment: Mapping[str, str]) -> None:
    subprocess.run(  # noqa: S603 - the interpreter itself
        command, env=environment, check=True, capture_output=True, text=True, timeout=_SECONDS
    )


def explain_error(error: subprocess.SubprocessError | OSError) -> str:
    """The last line of the failed program's output, or why it could not run."""
    said = str(getattr(error, "stderr", None) or error).strip()
    return said.splitlines()[-1] if said else type(error).__name__


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
