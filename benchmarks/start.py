"""Seconds from the start of the service's process to ready, and its peak memory.

    python -m benchmarks.start FOLDER --rounds 5 --tree . --tree ../another-checkout

Checkouts alternate. The weights are in the system's file cache.
"""

import argparse
import compileall
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.workload import alternate
from tests.support.memory import status_bytes
from tests.support.server import REPOSITORY, run_server
from tools.table import markdown

_READY = "Server ready to accept requests"


def settings_of(folder: Path, dtype: str) -> dict[str, str]:
    """Return the settings of a service with only this model."""
    models = {"EMBEDDING_MODEL": str(folder), "RERANKER_MODEL": "late-interaction"}
    return models | {"DTYPE": dtype}


def measure(
    folder: Path, cases: Mapping[str, tuple[Path, str]], rounds: int
) -> dict[str, list[tuple[float, int]]]:
    """Return seconds until ready and peak MiB of each round, for each checkout and DTYPE."""
    figures: dict[str, list[tuple[float, int]]] = {name: [] for name in cases}
    for tree, _ in cases.values():
        # Otherwise a new checkout would compile its modules in the first round.
        for package in ("app", "smart_embedder"):
            compileall.compile_dir(tree / package, quiet=1)
    for name in alternate(dict.fromkeys(cases, rounds)):
        tree, dtype = cases[name]
        settings = {"PYTHONPATH": str(tree.resolve())} | settings_of(folder, dtype)
        started = time.perf_counter()
        with run_server(folder, "app", fresh=True, healthy=False, **settings) as server:
            server.wait_for_line(_READY)
            seconds = time.perf_counter() - started
            peak = status_bytes(server.process.pid, "VmHWM") >> 20
        figures[name].append((round(seconds, 2), peak))
        print(f"{name}: {seconds:.2f} s", file=sys.stderr)
    return figures


def main() -> None:
    """Print a row for each checkout."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("folder", type=Path, help="a checkpoint of bge-m3's shape")
    add("--dtype", default="auto", help="the number format, as DTYPE (%(default)s)")
    add("--rounds", type=int, default=5, help="starts of each checkout (%(default)s)")
    add("--tree", type=Path, action="append", help="a checkout; may be repeated (this one)")
    arguments = parser.parse_args()
    cases = {str(tree): (tree, arguments.dtype) for tree in arguments.tree or [REPOSITORY]}
    rows = []
    for tree, runs in measure(arguments.folder.resolve(), cases, arguments.rounds).items():
        seconds, peaks = zip(*runs, strict=True)
        spread = f"{min(seconds):.2f} to {max(seconds):.2f}"
        rows.append((tree, f"{statistics.median(seconds):.2f}", spread, max(peaks)))
    print(markdown(("checkout", "seconds, median", "range", "peak memory, MiB"), rows))


if __name__ == "__main__":
    main()
