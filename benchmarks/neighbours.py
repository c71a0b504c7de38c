"""What a lone short text waits for: on a quiet machine, beside a busy process, beside bulk.

    python -m benchmarks.neighbours

One text after the other, over HTTP, of a client with a token of its own. What stands beside it is
a process that computes without end, or another client, which keeps the service busy with many
texts. Everything shares the same cores. The cases take turns, because the speed of a shared machine
drifts. The demo model is served.
"""

import multiprocessing
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path

import httpx2
import numpy as np

from benchmarks.workload import QUERIES, draw_texts, turns
from tests.support.server import REPOSITORY, RunningServer, run_server
from tools.table import markdown

TEXT = "How do I reset my password?"
BULK_CLIENTS, BULK_TEXTS = 4, 8
ROUNDS = 3
# Of each measurement; and between two requests, as of a client that does something with the answer.
SECONDS, PAUSE = 3.0, 0.005
TOKENS = {"lone": "the-lone-text-has-its-own-token", "bulk": "and-the-others-have-another-one"}


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


LOADS: dict[str, Callable[[str, Event], None] | None] = {
    "nothing": None,
    "a busy process": compute,
    "bulk": send_bulk,
}


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


def window(client: httpx2.Client) -> list[float]:
    """The milliseconds of each text; the first ones, for which the load settles, do not count."""
    for _ in range(3):
        embed(client, {"sentences": [TEXT]})
    found: list[float] = []
    until = time.perf_counter() + SECONDS
    while time.perf_counter() < until:
        began = time.perf_counter()
        embed(client, {"sentences": [TEXT]})
        found.append(1000 * (time.perf_counter() - began))
        time.sleep(PAUSE)
    return found


def table() -> tuple[Sequence[str], list[list[str]]]:
    """Measure; the heads, and a row for each load."""
    found: dict[str, list[float]] = {load: [] for load in LOADS}
    with tempfile.TemporaryDirectory() as scratch:
        folder, tokens = Path(scratch, "demo"), Path(scratch, "tokens")
        # In a process of its own: PyTorch is not to be loaded here.
        demo = [sys.executable, "-m", "tools.demo", str(folder)]
        subprocess.run(demo, cwd=REPOSITORY, check=True, stdout=sys.stderr)
        tokens.write_text("".join(f"{name}:{token}\n" for name, token in TOKENS.items()))
        settings = {"EMBEDDING_MODEL": str(folder), "API_TOKENS_FILE": str(tokens)}
        with run_server(Path(scratch), fresh=True, DTYPE="auto", **settings) as server:
            for load in turns(dict.fromkeys(LOADS, ROUNDS)):
                with client_of(server.url, "lone") as client, beside(load, server):
                    found[load] += window(client)
    rows = []
    quiet = np.percentile(found["nothing"], [50, 95])
    for load, took in found.items():
        percentiles = np.percentile(took, [50, 95])
        figures = [f"{each:.1f}" for each in percentiles]
        figures += [f"{each:.2f}" for each in percentiles / quiet]
        rows.append([load, str(len(took)), *figures])
    return ("beside", "texts", "P50 ms", "P95 ms", "P50 to quiet", "P95 to quiet"), rows


if __name__ == "__main__":
    print(markdown(*table()))
