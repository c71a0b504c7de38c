"""Writes requirements/torch-cpu.lock: the hashes of torch's wheels on PyTorch's index for CPUs.

uv would lock one wheel's local version (`+cpu`) for all platforms, and macOS has none. Called by
scripts/lock.sh. Where the index is out of reach, the file stays if it is of the wanted version.
"""

import re
import sys
import urllib.request
from pathlib import Path
from urllib.parse import unquote

INDEX = "https://download.pytorch.org/whl/cpu"
LOCK = Path("requirements/torch-cpu.lock")
REQUIREMENTS = Path("requirements-cpu.txt")
OLDEST_PYTHON = 11
HEAD = f"""\
# Made by scripts/lock.sh from {REQUIREMENTS}: change that, and run it again.
# torch without CUDA, for every platform: from PyTorch's own index, which is asked for nothing else.
--index-url {INDEX}
"""
_LINK = re.compile(r'href="[^"]*?([^"/]+\.whl)#sha256=([0-9a-f]{64})"')


def main() -> int:
    """Write the lock; 1 where it cannot be brought to the version of the requirements."""
    requirements = REQUIREMENTS.read_text("utf-8")
    (version,) = set(re.findall(r"(?m)^torch==([0-9.]+)", requirements))
    try:
        with urllib.request.urlopen(f"{INDEX}/torch/", timeout=30) as answer:
            page = answer.read().decode()
    except OSError as error:
        print(f"PyTorch's index is out of reach ({error}).", file=sys.stderr)
        return 0 if f"\ntorch=={version} " in LOCK.read_text("utf-8") else 1
    LOCK.write_text(lock_of(page, version), "utf-8")
    return 0


def lock_of(page: str, version: str) -> str:
    """The lock of one version's wheels, as the index page lists them; raises where it has none."""
    # Of that version, its `+cpu` build included, and of a Python of ours.
    wanted = re.compile(rf"torch-{re.escape(version)}(?:\+cpu)?-cp3(\d+)-.*")
    found = ((wanted.fullmatch(unquote(name)), digest) for name, digest in _LINK.findall(page))
    digests = sorted(
        {digest for is_it, digest in found if is_it and int(is_it[1]) >= OLDEST_PYTHON}
    )
    if not digests:
        raise ValueError(f"PyTorch's index has no torch {version}")
    hashes = [f"--hash=sha256:{digest}" for digest in digests]
    return HEAD + " \\\n    ".join([f"torch=={version}", *hashes]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
