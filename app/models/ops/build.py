"""Build the kernels where the processor can run them: `python -m app.models.ops.build`.

The compiler is a package from the index, fetched for this alone and removed again, so that the
library is the same wherever it is built and nothing has to be installed. `--anywhere` does not look
at the processor, for images that are built on one machine and run on another.

It ends with 0 where the library is there or of no use, and with 1 and a sentence where it cannot be
built: the service runs without it, only slower.
"""

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from app.models.ops.instruction_sets import X86_64, InstructionSet, runnable

FOLDER = Path(__file__).parent / "csrc"
# The C library of PyTorch's own builds for Linux, or any newer one.
_TARGET = ("-target", "x86_64-linux-gnu.2.28")
_COMPILE = (
    *("-std=c17", "-O3", "-Wall", "-Wextra", "-Werror", "-fPIC", "-mprefer-vector-width=512"),
    # Sums may be computed in any order; what is not a number stays that.
    *("-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros"),
    "-freciprocal-math",
)
# PyTorch brings the threads.
_LINK = ("-shared", "-s", "-Wl,-z,undefs", "-lm")
# The other sources are compiled once for each set of instructions.
_SHARED_SOURCE = "scratch.c"
_COMPILER = FOLDER.parent / "requirements-kernels.txt"
_SECONDS = 600


def library_path() -> Path:
    """Where the library of just these sources is, once it is built.

    A library of other sources, which might take other arguments, has another name.
    """
    flags = (*_TARGET, *_COMPILE, *_LINK, *map(str, X86_64))
    digest = hashlib.sha256(" ".join(flags).encode())
    for source in sorted(FOLDER.glob("*.[ch]")):
        digest.update(source.read_bytes())
    return FOLDER / f"kernels-{digest.hexdigest()[:16]}.so"


def main(arguments: list[str]) -> int:
    """Build what is missing."""
    if library_path().exists() or not is_of_use(anywhere="--anywhere" in arguments):
        return 0
    print("Building the kernels (a compiler of 100 MB is fetched for it) ...", flush=True)  # noqa: T201
    try:
        build()
    except (subprocess.SubprocessError, OSError) as error:
        print(f"The kernels could not be built: {explain(error)}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def is_of_use(*, anywhere: bool = False) -> bool:
    """Whether this is Linux on x86-64 (with glibc, as PyTorch is) and its processor fits."""
    fits = platform.libc_ver()[0] == "glibc" and platform.machine() == "x86_64"
    return fits and (anywhere or any(runnable(_processor_flags())))


def _processor_flags() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())


def build() -> None:
    """Fetch the compiler, compile, and put the library in its place."""
    with TemporaryDirectory(prefix="smart-embedder-kernels-") as temporary:
        folder = Path(temporary)
        _run([sys.executable, "-m", "pip", *_pip_options(folder / "compiler")], os.environ)
        compile_with(folder / "compiler", folder)


def compile_with(compiler: Path, folder: Path) -> None:
    """Compile with the package ziglang in `compiler`; what else is written goes to `folder`."""
    caches = {f"ZIG_{kind}_CACHE_DIR": str(folder / "cache") for kind in ("GLOBAL", "LOCAL")}
    environment = {**os.environ, "PYTHONPATH": str(compiler), **caches}
    commands = dict(_compilations(folder))
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(lambda command: _run(command, environment), commands.values()))
    library = library_path()
    # Beside its place, so that it comes there in one step.
    made = library.with_suffix(f".{os.getpid()}")
    try:
        _run([*_cc(), *_LINK, *map(str, commands), "-o", str(made)], environment)
        made.replace(library)
    finally:
        made.unlink(missing_ok=True)
    for other in set(FOLDER.glob("kernels-*.so")) - {library}:
        other.unlink(missing_ok=True)


def _compilations(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """Each object file, and the command that makes it."""
    for source in sorted(FOLDER.glob("*.c")):
        for each in X86_64[-1:] if source.name == _SHARED_SOURCE else X86_64:
            made = folder / f"{source.stem}-{each.name}.o"
            yield made, [*_cc(), *_flags_of(each), "-c", str(source), "-o", str(made)]


def _cc() -> list[str]:
    return [sys.executable, "-m", "ziglang", "cc", *_TARGET]


def _flags_of(instructions: InstructionSet) -> list[str]:
    return [f"-mcpu={instructions.processor}", f"-DINSTRUCTIONS={instructions.name}", *_COMPILE]


def _pip_options(target: Path) -> list[str]:
    quiet = ["--quiet", "--no-input", "--disable-pip-version-check"]
    safe = ["--no-deps", "--require-hashes", "--only-binary=:all:"]
    return ["install", *quiet, *safe, "--target", str(target), "--requirement", str(_COMPILER)]


def _run(command: list[str], environment: Mapping[str, str]) -> None:
    subprocess.run(  # noqa: S603 - the interpreter itself
        command, env=environment, check=True, capture_output=True, text=True, timeout=_SECONDS
    )


def explain(error: subprocess.SubprocessError | OSError) -> str:
    """The last line that the failed program said, or what kept it from running."""
    said = str(getattr(error, "stderr", None) or error).strip()
    return said.splitlines()[-1] if said else type(error).__name__


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
