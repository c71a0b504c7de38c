"""Write requirements/torch-cpu.lock: the hashes of torch's wheels on PyTorch's index for CPUs.

uv would lock the local version (`+cpu`) of one wheel for all platforms, but macOS has none.
scripts/lock.sh runs this. If the index cannot be reached, a file of the same version stays.
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
    """Write the lock; return 1 if the index cannot be reached and the version has changed."""
    requirements = REQUIREMENTS.read_text("utf-8")
    (version,) = set(re.findall(r"(?m)^torch==([0-9.]+)", requirements))
    try:
        with urllib.request.urlopen(f"{INDEX}/torch/", timeout=30) as answer:
            page = answer.read().decode()
    except OSError as error:
        print(f"PyTorch's index cannot be reached ({error}).", file=sys.stderr)
        return 0 if f"\ntorch=={version} " in LOCK.read_text("utf-8") else 1
    LOCK.write_text(lock_of(page, version), "utf-8")
    return 0


def lock_of(page: str, version: str) -> str:
    """Build the lock from the index page; raise `ValueError` if it lacks the version."""
    wheel = re.compile(rf"torch-{re.escape(version)}(?:\+cpu)?-cp3(\d+)-.*")
    matches = ((wheel.fullmatch(unquote(name)), digest) for name, digest in _LINK.findall(page))
    digests = sorted(
        {digest for match, digest in matches if match and int(match[1]) >= OLDEST_PYTHON}
    )
    if not digests:
        raise ValueError(f"PyTorch's index has no torch {version}")
    hashes = [f"--hash=sha256:{digest}" for digest in digests]
    return HEAD + " \\\n    ".join([f"torch=={version}", *hashes]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
