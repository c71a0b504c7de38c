"""From the start of the service's process to ready, and its peak memory; checkouts take turns.

    python -m benchmarks.start FOLDER --rounds 5 --tree . --tree ../another-checkout

The files of the weights are in the system's cache.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

from benchmarks.workload import turns
from tests.support.memory import status_bytes
from tests.support.server import REPOSITORY, run_server
from tools.table import markdown

_READY = "Server ready to accept requests"


def start(tree: Path, folder: Path, settings: dict[str, str]) -> tuple[float, int]:
    """Seconds until the service in `tree` is ready, and its peak memory in MiB."""
    began = time.perf_counter()
    settings = {"PYTHONPATH": str(tree)} | settings
    with run_server(folder, "app", fresh=True, healthy=False, **settings) as server:
        server.wait_for_line(_READY)
        seconds = time.perf_counter() - began
        return seconds, status_bytes(server.process.pid, "VmHWM") >> 20


def settings_of(folder: Path, dtype: str) -> dict[str, str]:
    """Those of a service that has this model alone."""
    models = {"EMBEDDING_MODEL": str(folder), "RERANKER_MODEL": "late-interaction"}
    return models | {"DTYPE": dtype}


def main() -> None:
    """Print a row for each checkout."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("folder", type=Path, help="a checkpoint of bge-m3's shape")
    add("--dtype", default="auto", help="the number format, as DTYPE (%(default)s)")
    add("--rounds", type=int, default=5, help="turns of each checkout (%(default)s)")
    add("--tree", type=Path, action="append", help="a checkout; may be repeated (this one)")
    arguments = parser.parse_args()
    folder, trees = arguments.folder.resolve(), arguments.tree or [REPOSITORY]
    settings = settings_of(folder, arguments.dtype)
    seen: dict[Path, list[tuple[float, int]]] = {tree: [] for tree in trees}
    for tree in turns(dict.fromkeys(trees, arguments.rounds)):
        seen[tree].append(start(tree.resolve(), folder, settings))
        print(f"{tree}: {seen[tree][-1][0]:.2f} s", file=sys.stderr)
    rows = []
    for tree, runs in seen.items():
        seconds, peaks = zip(*runs, strict=True)
        spread = f"{min(seconds):.2f} to {max(seconds):.2f}"
        rows.append((tree, f"{statistics.median(seconds):.2f}", spread, max(peaks)))
    print(markdown(("checkout", "seconds, median", "range", "peak memory, MiB"), rows))


if __name__ == "__main__":
    main()
