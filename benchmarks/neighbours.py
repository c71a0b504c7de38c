"""Latency of one short text over HTTP: on a quiet machine, and beside other load.

    python -m benchmarks.neighbours --rounds 5 --tree . --tree ../another-checkout

A client sends one text after the other. The load is a process that computes without end, or a
second client that keeps the service busy with bulk requests. All share the same cores. The cases
alternate, because the speed of a shared machine drifts. Without a folder the demo model is served.
"""

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path

import httpx2
import numpy as np

from benchmarks.workload import QUERIES, alternate, draw_texts
from tests.support.server import REPOSITORY, RunningServer, run_server
from tools.table import markdown

TEXT = "How do I reset my password?"
BULK_CLIENTS, BULK_TEXTS = 4, 8
# Seconds between two requests, as of a client that uses the response.
PAUSE = 0.005
TOKENS = {"lone": "the-lone-text-has-its-own-token", "bulk": "and-the-others-have-another-one"}


def compute(_: str, running: Event) -> None:
    """Compute without end."""
    running.set()
    while True:
        pass


def send_bulk(url: str, running: Event) -> None:
    """Send requests of many texts on several connections, without end."""

    def keep_sending(seed: int) -> None:
        body = {"sentences": draw_texts(QUERIES, BULK_TEXTS, seed)}
        with client_of(url, "bulk") as client:
            while True:
                embed(client, body | {"return_sparse": False, "return_colbert": False})
                running.set()

    for seed in range(BULK_CLIENTS):
        threading.Thread(target=keep_sending, args=(seed,)).start()


QUIET = "nothing"
LOADS: dict[str, Callable[[str, Event], None]] = {"a busy process": compute, "bulk": send_bulk}


def client_of(url: str, name: str) -> httpx2.Client:
    """Create a client with the token of this name."""
    headers = {"Authorization": f"Bearer {TOKENS[name]}"}
    return httpx2.Client(base_url=url, headers=headers, timeout=120)


def embed(client: httpx2.Client, body: dict[str, object]) -> None:
    """Send one request; raise unless it succeeds."""
    client.post("/embeddings/", json=body).raise_for_status()


@contextmanager
def run_load(load: str, server: RunningServer) -> Iterator[None]:
    """Run a load in another process; at the end, wait until the service has no more work."""
    if load == QUIET:
        yield
        return
    target, processes = LOADS[load], multiprocessing.get_context("spawn")
    running = processes.Event()
    process = processes.Process(target=target, args=(server.url, running))
    process.start()
    try:
        assert running.wait(120), f"{load} did not start"
        yield
    finally:
        process.kill()
        process.join()
        server.wait_for_metric("embedding_active_requests", 0)


def measure_latency(client: httpx2.Client, seconds: float) -> list[float]:
    """Return the milliseconds of each text, except of the first ones, while the load settles."""
    for _ in range(3):
        embed(client, {"sentences": [TEXT]})
    latencies: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        embed(client, {"sentences": [TEXT]})
        latencies.append(1000 * (time.perf_counter() - started))
        time.sleep(PAUSE)
    return latencies


def measure(
    folder: Path | None, trees: Sequence[Path], loads: Sequence[str], rounds: int, seconds: float
) -> dict[tuple[Path, str], list[float]]:
    """Return the milliseconds of each text by checkout and load; without a folder, of the demo."""
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        if folder is None:
            folder = Path(scratch, "demo")
            # In another process, so that PyTorch is not loaded in this one.
            demo = [sys.executable, "-m", "tools.demo", str(folder)]
            subprocess.run(demo, cwd=REPOSITORY, check=True, stdout=sys.stderr)
        tokens = Path(scratch, "tokens")
        tokens.write_text("".join(f"{name}:{token}\n" for name, token in TOKENS.items()))
        settings = {"EMBEDDING_MODEL": str(folder.resolve()), "API_TOKENS_FILE": str(tokens)}
        settings["DTYPE"] = "auto"
        servers = {}
        for tree in trees:
            path = {"PYTHONPATH": str(tree.resolve())}
            server = stack.enter_context(run_server(Path(scratch), fresh=True, **settings, **path))
            servers[tree] = server
        cases = [(tree, load) for tree in servers for load in (QUIET, *loads)]
        latencies: dict[tuple[Path, str], list[float]] = {case: [] for case in cases}
        for tree, load in alternate(dict.fromkeys(cases, rounds)):
            with client_of(servers[tree].url, "lone") as client, run_load(load, servers[tree]):
                latencies[tree, load] += measure_latency(client, seconds)
    return latencies


def tabulate(
    latencies: dict[tuple[Path, str], list[float]],
) -> tuple[Sequence[str], list[list[str]]]:
    """Return the heads, and a row for each load and, if there are several, each checkout."""
    several, rows = len({tree for tree, _ in latencies}) > 1, []
    for (tree, load), milliseconds in latencies.items():
        p50, p95 = np.percentile(milliseconds, [50, 95])
        # Of the same checkout on the quiet machine.
        quiet50, quiet95 = np.percentile(latencies[tree, QUIET], [50, 95])
        figures = (f"{p50:.1f}", f"{p95:.1f}", f"{p50 / quiet50:.2f}", f"{p95 / quiet95:.2f}")
        rows.append([*([str(tree)] if several else []), load, str(len(milliseconds)), *figures])
    heads = ("beside", "texts", "P50 ms", "P95 ms", "P50 to quiet", "P95 to quiet")
    return ("checkout", *heads) if several else heads, rows


def main() -> None:
    """Start a server for each checkout and print a row for each checkout and load."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("folder", type=Path, nargs="?", help="a checkpoint of bge-m3's shape (the demo)")
    add("--seconds", type=float, default=3, help="seconds of each measurement (%(default)g)")
    add("--rounds", type=int, default=5, help="measurements of each case (%(default)s)")
    add("--cores", type=int, default=2, help="cores that all processes share (%(default)s)")
    add("--tree", type=Path, action="append", help="a checkout; may be repeated (this one)")
    add("--beside", nargs="+", choices=LOADS, default=[*LOADS], help="loads (%(default)s)")
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    trees = options.tree or [REPOSITORY]
    latencies = measure(options.folder, trees, options.beside, options.rounds, options.seconds)
    print(markdown(*tabulate(latencies)))


if __name__ == "__main__":
    main()
