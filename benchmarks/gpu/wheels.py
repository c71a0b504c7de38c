"""Download the packages of the lock files, without PyTorch, for a machine with no package index.

python -m benchmarks.gpu.wheels FOLDER --python 3.12 [PACKAGE ...]
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_ROOT = Path(__file__).parents[2]
_LOCKS = tuple(f"requirements/{name}.lock" for name in ("service", "verify", "dev"))
# Packages of PyTorch's build for CUDA, which the other machine has.
_WITH_PYTORCH = "requirements/torch-gpu.lock"
# Minor versions of manylinux_2: pip does not accept older ones by itself.
_GLIBC = (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)


def requirements(python: str, only: list[str]) -> Iterator[str]:
    """Yield the packages of the locks for this version of Python, as `name==version`."""
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    names = {canonicalize_name(name) for name in only}
    excluded = {canonicalize_name(locked.name) for locked in _read_lock(_WITH_PYTORCH)}
    found: dict[str, str] = {}
    for locked in chain.from_iterable(map(_read_lock, _LOCKS)):
        name = canonicalize_name(locked.name)
        applies = locked.marker is None or locked.marker.evaluate(environment)
        if applies and name not in excluded and (not names or name in names):
            found[name] = f"{locked.name}{locked.specifier}"
    yield from found.values()


def _read_lock(lock: str) -> list[Requirement]:
    lines = re.findall(r"^[A-Za-z0-9].*", (_ROOT / lock).read_text("utf-8"), re.MULTILINE)
    return [Requirement(line.rstrip("\\ ")) for line in lines]


def download(folder: Path, python: str, packages: list[str]) -> bool:
    """Download wheels with pip; return whether there is one for each package."""
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in _GLIBC]
    options = ["--no-deps", "--only-binary=:all:", f"--python-version={python}", "--quiet"]
    pip = [sys.executable, "-m", "pip", "download", *options, "--implementation=cp", *platforms]
    return subprocess.run([*pip, "--dest", str(folder), *packages], check=False).returncode == 0


def main() -> int:
    """Download all packages at once, or one by one if one has no wheel; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("packages", nargs="*", help="only these")
    parser.add_argument("--python", default="3.12", help="version on the other machine")
    arguments = parser.parse_args()
    packages = list(requirements(arguments.python, arguments.packages))
    if download(arguments.folder, arguments.python, packages):
        return 0
    missing = [
        package
        for package in packages
        if not download(arguments.folder, arguments.python, [package])
    ]
    print("no wheels of:", *missing)
    return 1


if __name__ == "__main__":
    sys.exit(main())
