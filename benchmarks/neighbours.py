"""What a lone short text waits for: on a quiet machine, beside a busy process, beside bulk.

    python -m benchmarks.neighbours --rounds 5 --tree . --tree ../another-checkout

One text after the other, over HTTP, of a client with a token of its own. What stands beside it is
a process that computes without end, or another client: one that keeps the service busy with many
texts or, where it is asked for, one whose requests are made to cost much. Everything shares the
same cores. The cases take turns, because the speed of a shared machine drifts. Without a folder the
demo model is served.
"""

import argparse
import gzip
import itertools
import json
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

from benchmarks.workload import QUERIES, draw_texts, turns
from tests.support.server import REPOSITORY, RunningServer, run_server
from tools.table import markdown

TEXT = "How do I reset my password?"
BULK_CLIENTS, BULK_TEXTS = 4, 8
# Between two requests, as of a client that does something with the answer. Seconds.
PAUSE = 0.005
TOKENS = {"lone": "the-lone-text-has-its-own-token", "bulk": "and-the-others-have-another-one"}
# Packed, so that much comes of little: a character that normalisation makes eighteen times as
# long, names that no schema has, and texts without end.
HOSTILE = {
    "/embeddings/": {"sentences": ["\ufdfa" * 300_000]},
    "/v2/embed": {f"return_{i:05}": 0 for i in range(7000)},
    "/tokenize": {"inputs": ["a b c d " * 120] * 1000},
}


def compute(_: str, running: Event) -> None:
    """Never sleep."""
    running.set()
    while True:
        pass


def send_bulk(url: str, running: Event) -> None:
    """Requests of many texts on several connections, without end."""

    def keep_sending(seed: int) -> None:
        body = {"sentences": draw_texts(QUERIES, BULK_TEXTS, seed)}
        with client_of(url, "bulk") as client:
            while True:
                embed(client, body | {"return_sparse": False, "return_colbert": False})
                running.set()

    for seed in range(BULK_CLIENTS):
        threading.Thread(target=keep_sending, args=(seed,)).start()


def be_hostile(url: str, running: Event) -> None:
    """Requests that cost much on several connections, without end; whatever the answers are."""
    packed = [(path, gzip.compress(json.dumps(body).encode())) for path, body in HOSTILE.items()]

    def keep_sending() -> None:
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        with client_of(url, "bulk") as client:
            for path, body in itertools.cycle(packed):
                client.post(path, content=body, headers=headers)
                running.set()

    for _ in range(BULK_CLIENTS):
        threading.Thread(target=keep_sending).start()


LOADS: dict[str, Callable[[str, Event], None] | None] = {
    "nothing": None,
    "a busy process": compute,
    "bulk": send_bulk,
    "a hostile client": be_hostile,
}
USUAL = ("a busy process", "bulk")


def client_of(url: str, name: str) -> httpx2.Client:
    """A client that presents the token of this name."""
    headers = {"Authorization": f"Bearer {TOKENS[name]}"}
    return httpx2.Client(base_url=url, headers=headers, timeout=120)


def embed(client: httpx2.Client, body: dict[str, object]) -> None:
    """One request, which has to succeed."""
    client.post("/embeddings/", json=body).raise_for_status()


@contextmanager
def beside(load: str, server: RunningServer) -> Iterator[None]:
    """Within the block the machine is under this load; at its end the service has no more work."""
    if (target := LOADS[load]) is None:
        yield
        return
    processes = multiprocessing.get_context("spawn")
    running = processes.Event()
    process = processes.Process(target=target, args=(server.url, running))
    process.start()
    try:
        assert running.wait(120), f"{load} never began"
        yield
    finally:
        process.kill()
        process.join()
        server.wait_for_metric("embedding_active_requests", 0)


def window(client: httpx2.Client, seconds: float) -> list[float]:
    """The milliseconds of each text; the first ones, for which the load settles, do not count."""
    for _ in range(3):
        embed(client, {"sentences": [TEXT]})
    found: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.perf_counter()
        embed(client, {"sentences": [TEXT]})
        found.append(1000 * (time.perf_counter() - began))
        time.sleep(PAUSE)
    return found


def measured(
    folder: Path | None, trees: Sequence[Path], loads: Sequence[str], rounds: int, seconds: float
) -> dict[tuple[Path, str], list[float]]:
    """The milliseconds of each text, for each checkout and each load; the demo without a folder."""
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        if folder is None:
            folder = Path(scratch, "demo")
            # In a process of its own: PyTorch is not to be loaded here.
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
        cases = [(tree, load) for tree in servers for load in ("nothing", *loads)]
        found: dict[tuple[Path, str], list[float]] = {case: [] for case in cases}
        for tree, load in turns(dict.fromkeys(cases, rounds)):
            with client_of(servers[tree].url, "lone") as client, beside(load, servers[tree]):
                found[tree, load] += window(client, seconds)
    return found


def table(found: dict[tuple[Path, str], list[float]]) -> tuple[Sequence[str], list[list[str]]]:
    """The heads, and a row for each load, of each checkout where there are several."""
    several, rows = len({tree for tree, _ in found}) > 1, []
    for (tree, load), took in found.items():
        p50, p95 = np.percentile(took, [50, 95])
        # To the same checkout beside nothing.
        quiet50, quiet95 = np.percentile(found[tree, "nothing"], [50, 95])
        figures = (f"{p50:.1f}", f"{p95:.1f}", f"{p50 / quiet50:.2f}", f"{p95 / quiet95:.2f}")
        rows.append([*([str(tree)] if several else []), load, str(len(took)), *figures])
    heads = ("beside", "texts", "P50 ms", "P95 ms", "P50 to quiet", "P95 to quiet")
    return ("checkout", *heads) if several else heads, rows


def main() -> None:
    """Start a server for each checkout and print a row for each of them and each load."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("folder", type=Path, nargs="?", help="a checkpoint of bge-m3's shape (the demo)")
    add("--seconds", type=float, default=3, help="seconds of each measurement (%(default)g)")
    add("--rounds", type=int, default=5, help="turns of each (%(default)s)")
    add("--cores", type=int, default=2, help="cores that everything shares (%(default)s)")
    add("--tree", type=Path, action="append", help="a checkout; may be repeated (this one)")
    add("--beside", nargs="+", choices=[*LOADS][1:], default=USUAL, help="loads (%(default)s)")
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    trees, asked = options.tree or [REPOSITORY], (options.beside, options.rounds, options.seconds)
    print(markdown(*table(measured(options.folder, trees, *asked))))


if __name__ == "__main__":
    main()
