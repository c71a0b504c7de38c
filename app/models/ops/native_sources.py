"""Where the sources of the kernels lie, and where their library does."""

import hashlib
from pathlib import Path

FOLDER = Path(__file__).parent / "csrc"
FLAGS = (
    # The C library of PyTorch's own builds for Linux, or any newer one.
    *("-target", "x86_64-linux-gnu.2.28"),
    *("-mcpu=x86_64_v4+avx512bf16+avx512vnni", "-mprefer-vector-width=512"),
    *("-std=c17", "-O3", "-Wall", "-Wextra", "-Werror"),
    # Sums may be computed in any order; what is not a number stays that.
    *("-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros"),
    "-freciprocal-math",
    # PyTorch brings the threads.
    *("-shared", "-fPIC", "-Wl,-z,undefs", "-lm"),
)


def sources() -> list[Path]:
    """The C files and their headers."""
    return sorted(path for path in FOLDER.iterdir() if path.suffix in {".c", ".h"})


def library_path() -> Path:
    """Where the library of just these sources is, once it is built.

    A library of other sources, which might take other arguments, has another name.
    """
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for source in sources():
        digest.update(source.read_bytes())
    return FOLDER / f"kernels-{digest.hexdigest()[:16]}.so"
