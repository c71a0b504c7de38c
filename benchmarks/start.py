"""From the start of the service's process to ready, and its peak memory; checkouts take turns.

    python -m benchmarks.start FOLDER --rounds 5 --tree . --tree ../another-checkout

The files of the weights are in the system's cache, or out of it with `--cold` (on POSIX systems).
"""

import argparse
import os
import re
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from benchmarks.turns import turns
from tests.support.server import REPOSITORY, run_server
from tools.table import markdown

_READY = "Server ready to accept requests"


def weights_of(folder: Path) -> list[Path]:
    """The files that hold a model's weights."""
    return [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]


def drop(paths: Iterable[Path]) -> None:
    """Take the files out of the system's cache."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def start(tree: Path, folder: Path, settings: dict[str, str]) -> tuple[float, int]:
    """Seconds until the service in `tree` is ready, and its peak memory in MiB."""
    began = time.perf_counter()
    with run_server(folder, "app", fresh=True, PYTHONPATH=str(tree), **settings) as server:
        server.wait_for_line(_READY)
        seconds = time.perf_counter() - began
        status = Path(f"/proc/{server.process.pid}/status").read_text(encoding="utf-8")
    found = re.search(r"VmHWM:\s*(\d+) kB", status)
    return seconds, int(found[1]) // 1024 if found else 0


def main() -> None:
    """Print a row for each checkout."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("folder", type=Path, help="a checkpoint of bge-m3's shape")
    add("--dtype", default="auto", help="the number format, as DTYPE (%(default)s)")
    add("--rounds", type=int, default=5, help="turns of each checkout (%(default)s)")
    add("--tree", type=Path, action="append", help="a checkout; may be repeated (this one)")
    add("--cold", action="store_true", help="measure with the weights out of the cache")
    arguments = parser.parse_args()
    trees = {str(tree.resolve()): tree for tree in arguments.tree or [REPOSITORY]}
    folder = str(arguments.folder.resolve())
    settings = {"EMBEDDING_MODEL": folder, "RERANKER_MODEL": "late-interaction"}
    settings["DTYPE"] = arguments.dtype
    seen: dict[str, list[tuple[float, int]]] = {path: [] for path in trees}
    for path in turns(dict.fromkeys(trees, arguments.rounds)):
        if arguments.cold:
            drop(weights_of(arguments.folder))
        seen[path].append(start(Path(path), arguments.folder, settings))
        print(f"{path}: {seen[path][-1][0]:.2f} s", file=sys.stderr)
    rows = []
    for path, runs in seen.items():
        seconds = sorted(took for took, _ in runs)
        spread = f"{seconds[0]:.2f} to {seconds[-1]:.2f}"
        median = f"{statistics.median(seconds):.2f}"
        rows.append((trees[path], median, spread, max(peak for _, peak in runs)))
    print(markdown(("checkout", "seconds, median", "range", "peak memory, MiB"), rows))


if __name__ == "__main__":
    main()
