"""Build the kernels if the processor can run them: `python -m smart_embedder.kernels.build`.

The build downloads a pinned compiler from the package index and removes it afterwards, so that the
library is the same wherever it is built. `--anywhere` ignores the processor, for images that run on
another machine. `--machine aarch64` builds for another architecture.

The exit status is 0 if the library exists or cannot be used here. It is 1, with a message, if the
build fails: the service then runs without the library, but slower.
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
    """A set of instructions that the kernels are compiled for.

    `name` is the suffix of its functions' names. `processor` is the compiler's name of the smallest
    processor that has the instructions. `needs` lists the features by Linux's names, which on
    x86-64 are also PyTorch's. `tile` is TILE in tile.h, `matrix_rows` is MATRIX_ROWS in vector.h.
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
    """An architecture, for which one library of kernels is built.

    `machine` is Linux's name of it. `target` is the compiler's name, with the version of the C
    library that PyTorch's builds need, and `flags` are further flags of the compiler. `sets` lists
    the instruction sets, the fastest first.
    """

    machine: str
    target: str
    flags: tuple[str, ...]
    sets: tuple[InstructionSet, ...]

    def runnable(self, features: Container[str]) -> Iterator[InstructionSet]:
        """Yield the sets that a processor with `features` runs, the fastest first."""
        for instructions in self.sets:
            if all(name in features for name in instructions.needs):
                yield instructions


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
ARCHITECTURES = {architecture.machine: architecture for architecture in (X86_64, AARCH64)}
# Linux's bits for features of ARM processors (asm/hwcap.h): the vector of bits, and the bit.
_HWCAP, _HWCAP2 = 16, 26
_ARM_FEATURES = {"asimddp": (_HWCAP, 20), "i8mm": (_HWCAP2, 13), "bf16": (_HWCAP2, 14)}


def current_architecture() -> Architecture:
    """Return this machine's architecture; X86_64 for an unknown one, where no set is runnable."""
    return ARCHITECTURES.get(platform.machine(), X86_64)


def arm_features() -> set[str]:
    """Return the features of this 64-bit ARM processor that kernels may need; on Linux alone."""
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.argtypes, getauxval.restype = [ctypes.c_ulong], ctypes.c_ulong
    return {name for name, (vector, bit) in _ARM_FEATURES.items() if getauxval(vector) >> bit & 1}


FOLDER = Path(__file__).parent / "csrc"
_COMPILE = (
    *("-std=c17", "-O3", "-Wall", "-Wextra", "-Werror", "-fPIC"),
    # The compiler may change the order of sums. NaN stays NaN.
    *("-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros"),
    "-freciprocal-math",
)
_CHECKED = ("-O1", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all")
_STRIP = "-s"
_LINK = ("-shared", _STRIP, "-lm", "-lpthread")
# This source is compiled once, the others once for each set of instructions.
_SHARED_SOURCE = "threads.c"
COMPILER = FOLDER.parent / "requirements-kernels.txt"
_SECONDS = 600


def library_path(architecture: Architecture | None = None) -> Path:
    """Return the path of the library, by default for this machine.

    Its name has a hash of the sources and flags, so that a library of older sources, whose
    functions may have other arguments, is never loaded.
    """
    flags = (*_COMPILE, *_LINK, str(architecture or current_architecture()))
    digest = hashlib.sha256(" ".join(flags).encode())
    for source in sorted(FOLDER.glob("*.[ch]")):
        digest.update(source.read_bytes())
    return FOLDER / f"kernels-{digest.hexdigest()[:16]}.so"


def main(argv: list[str]) -> int:
    """Build the library if it is missing; return the exit status."""
    parser = ArgumentParser(prog="python -m smart_embedder.kernels.build")
    parser.add_argument("--anywhere", action="store_true", help="ignore this machine's processor")
    parser.add_argument("--machine", choices=ARCHITECTURES, help="build for this architecture")
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
    """Whether this is Linux with glibc, which PyTorch needs, on a processor that runs a set."""
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
    """The compiler of the package ziglang, installed in `package`, which writes to `folder`.

    `checks` are flags of sanitizers, for scripts/check_sanitizers.sh alone: the compiled code stops
    at the first error and names its line.
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
        """Install the package from the index."""
        quiet = ["--quiet", "--no-input", "--disable-pip-version-check"]
        safe = ["--no-deps", "--require-hashes", "--only-binary=:all:"]
        package = ["--target", str(self._package), "--requirement", str(COMPILER)]
        _run([sys.executable, "-m", "pip", "install", *quiet, *safe, *package], os.environ)

    def compile_kernels(self) -> list[str]:
        """Compile each source for every set of instructions; return the object files."""
        sets = self.architecture.sets
        commands: dict[str, list[str]] = {}
        for source in sorted(FOLDER.glob("*.c")):
            for instructions in sets[-1:] if source.name == _SHARED_SOURCE else sets:
                output = str(self._folder / f"{source.stem}-{instructions.name}.o")
                target = [
                    f"-mcpu={instructions.processor}",
                    f"-DINSTRUCTIONS={instructions.name}",
                ]
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
    """Compile and link the library, and remove libraries of older sources."""
    objects = compiler.compile_kernels()
    library = library_path(compiler.architecture)
    # Linked under another name in the same folder, then renamed: no process loads half a library.
    temporary = library.with_suffix(f".{os.getpid()}")
    try:
        link: tuple[str, ...] = _LINK
        if compiler.checks:  # The process that loads the library has the sanitizers' functions.
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
    """Return the last line of the failed program's output, or the reason why it did not run."""
    output = str(getattr(error, "stderr", None) or error).strip()
    return output.splitlines()[-1] if output else type(error).__name__


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
