"""What a busy neighbour on the same cores costs a few short texts.

    python -m benchmarks.neighbours --seconds 3 --rounds 5 --before ../an-older-checkout

One request after the other, each of four short texts: to the engine in its process, and over HTTP.
Windows without and with load take turns, because the speed of a shared machine drifts. The load is
another process that computes without end, or a bulk load of the service itself by another client.
Everything runs on the same cores, two unless `--cores` says otherwise. Without a folder the demo
model is served. With `--before` the same is measured of an older checkout in the same turns.
"""

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import numpy as np

from benchmarks.adapters.interface import Setting
from benchmarks.process import engine_process
from benchmarks.workload import QUERIES, draw_texts
from tests.support.server import REPOSITORY, RunningServer, run_server

TEXTS = [
    "What is hybrid search?",
    "How do I reset my password?",
    "The ferry leaves at noon.",
    "Prices rose by three percent in May.",
]
QUIET, BUSY, BULK = "quiet", "busy process", "bulk load"
BULK_CLIENTS, BULK_TEXTS = 4, 8
# What a window begins with is not counted: the load has to settle.
_UNCOUNTED = 3
# Between two requests, as of a client that does something with the answer. Seconds.
_PAUSE = 0.005
_PATIENCE = 120.0
_OWN, _BULK = "the-short-requests-own-token", "the-bulk-load-has-another-one"

# Sends the texts once; returns the seconds it took.
Ask = Callable[[], Awaitable[float]]


@dataclass(frozen=True, slots=True)
class Place:
    """Where the texts are sent to: a server, or an engine in its process, where `server` is None.

    `tree` names the checkout.
    """

    tree: str
    ask: Ask
    server: RunningServer | None = None

    @property
    def name(self) -> str:
        """Place and checkout, for the table."""
        return f"{'engine' if self.server is None else 'HTTP'}, {self.tree}"

    @property
    def loads(self) -> list[str]:
        """What it can be measured beside."""
        return [QUIET, BUSY] if self.server is None else [QUIET, BUSY, BULK]


Seconds = dict[tuple[str, str], list[float]]


async def measure(places: list[Place], options: argparse.Namespace) -> Seconds:
    """The seconds of every request, by place and load."""
    found: Seconds = defaultdict(list)
    with computing_process() as busy:
        for _ in range(options.rounds):
            for place in places:
                for load in place.loads[: options.loads]:
                    async with under(load, place, busy):
                        found[place.name, load] += await window(place.ask, options.seconds)
    return found


@asynccontextmanager
async def under(load: str, place: Place, busy: "subprocess.Popen[bytes]") -> AsyncIterator[None]:
    """Within the block the machine is under this load."""
    if load == BULK and place.server is not None:
        with bulk_client(place.server):
            yield
        await asyncio.to_thread(place.server.wait_for_metric, "embedding_active_requests", 0)
        return
    if load == BUSY:
        busy.send_signal(signal.SIGCONT)
    yield
    busy.send_signal(signal.SIGSTOP)


async def window(ask: Ask, seconds: float) -> list[float]:
    """One request after the other."""
    for _ in range(_UNCOUNTED):
        await ask()
    until = time.perf_counter() + seconds
    found: list[float] = []
    while time.perf_counter() < until or not found:
        found.append(await ask())
        await asyncio.sleep(_PAUSE)
    return found


@contextmanager
def computing_process() -> "Iterator[subprocess.Popen[bytes]]":
    """A process with one thread that never sleeps, stopped at first."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        process.send_signal(signal.SIGSTOP)
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def bulk_client(server: RunningServer) -> Iterator[None]:
    """A process that keeps the service saturated; it does so when the block begins."""
    command = [sys.executable, "-m", "benchmarks.neighbours", "--bulk", server.url]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield
        finally:
            process.kill()


async def send_bulk(url: str) -> None:
    """Requests of many texts from several connections, without end; a line once one is answered."""

    async def keep_sending(seed: int) -> None:
        body = {"sentences": draw_texts(QUERIES, BULK_TEXTS, seed)}
        kinds = {"return_sparse": False, "return_colbert": False}
        while True:
            await client.post("/embeddings/", json=body | kinds)
            print("answered", flush=True)

    async with connect(url, _BULK) as client:
        await asyncio.gather(*map(keep_sending, range(BULK_CLIENTS)))


def connect(url: str, token: str) -> httpx2.AsyncClient:
    """A client that presents a token."""
    headers = {"Authorization": f"Bearer {token}"}
    return httpx2.AsyncClient(base_url=url, timeout=_PATIENCE, headers=headers)


async def engine_of(stack: AsyncExitStack, name: str, tree: Path, folder: Path) -> Place:
    """The engine of a checkout in a process of its own, which takes the times itself."""
    process = engine_process(Path(sys.executable), _PATIENCE, tree)
    engine = await stack.enter_async_context(process)
    await engine.load("smart_embedder", folder, "auto")

    async def ask() -> float:
        return (await engine.encode(TEXTS, Setting())).seconds[0]

    return Place(name, ask)


async def service_of(
    stack: AsyncExitStack, name: str, tree: Path, folder: Path, tokens: Path
) -> Place:
    """The service of a checkout."""
    server = stack.enter_context(
        run_server(
            tokens.parent,
            EMBEDDING_MODEL=str(folder),
            DTYPE="auto",
            API_TOKENS_FILE=str(tokens),
            PYTHONPATH=str(tree),
        )
    )
    await asyncio.to_thread(server.wait_until_healthy)
    client = await stack.enter_async_context(connect(server.url, _OWN))

    async def ask() -> float:
        began = time.perf_counter()
        (await client.post("/embeddings/", json={"sentences": TEXTS})).raise_for_status()
        return time.perf_counter() - began

    return Place(name, ask, server)


async def run(options: argparse.Namespace, scratch: Path) -> None:
    """Start everything, measure and report."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    folder = (options.folder or make_demo(scratch / "demo")).resolve()
    tokens = scratch / "tokens"
    tokens.write_text(f"own:{_OWN}\nbulk:{_BULK}\n")
    trees = {"now": REPOSITORY} | ({"before": options.before.resolve()} if options.before else {})
    async with AsyncExitStack() as stack:
        engines = [await engine_of(stack, name, tree, folder) for name, tree in trees.items()]
        services = [
            await service_of(stack, name, tree, folder, tokens) for name, tree in trees.items()
        ]
        report(await measure([*engines, *services], options))


def make_demo(folder: Path) -> Path:
    """The demo model; by another process, since PyTorch is not to be loaded here."""
    subprocess.run([sys.executable, "-m", "tools.demo", folder], cwd=REPOSITORY, check=True)
    return folder


def report(found: Seconds) -> None:
    """A line for each place and load; ratios are to the quiet times of the same place."""
    print(f"{'':16}{'beside':14}{'requests':>9}{'P50 ms':>9}{'P95 ms':>9}{'ratios':>14}")
    for (place, load), seconds in found.items():
        p50, p95 = 1000 * np.percentile(seconds, [50, 95])
        quiet = 1000 * np.percentile(found[place, QUIET], [50, 95])
        ratios = "" if load == QUIET else f"{p50 / quiet[0]:8.2f}{p95 / quiet[1]:6.2f}"
        print(f"{place:16}{load:14}{len(seconds):9}{p50:9.1f}{p95:9.1f}{ratios:>14}")


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", help="a checkpoint of bge-m3's shape")
    parser.add_argument(
        "--seconds", type=float, default=3, help="seconds of each measurement (%(default)g)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each case (%(default)s)")
    parser.add_argument(
        "--loads", type=int, default=3, help="how many of: quiet, a busy process, a bulk load"
    )
    parser.add_argument(
        "--cores", type=int, default=2, help="cores that everything shares (%(default)s)"
    )
    parser.add_argument("--before", type=Path, help="an older checkout, to compare with")
    parser.add_argument("--bulk", metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bulk:
        asyncio.run(send_bulk(options.bulk))
        return
    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(run(options, Path(scratch)))


if __name__ == "__main__":
    main()
