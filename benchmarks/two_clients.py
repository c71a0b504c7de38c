"""What one client with hundreds of connections costs another who sends one small request at a time.

    python -m benchmarks.two_clients --seconds 20 --rounds 3 --before ../an-older-checkout

Alice keeps 300 connections busy with bulk of several kinds, from a process of her own; Bob sends
one sentence after the other. Each has a token. With `--before` a server of that
checkout takes turns with this one's on Alice alone, because the speed of a shared machine drifts.
A forward's time is that of the forwards Bob's requests rode in. The rate limit is out of the way.
"""

import argparse
import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from benchmarks.checkpoints import SHAPES, save_bge_m3
from benchmarks.turns import turns
from benchmarks.workload import MIXED, draw_texts
from tests.support.server import REPOSITORY, RunningServer, run_server

SENTENCE = "babebi bobuba cacece dadedi fafefi gagegi hahehi jajeji"

CONNECTIONS = 300
ALICE, BOB = "alices-token-of-the-benchmark", "bobs-token-of-the-benchmark"
MOST_FORWARDS = 3.0
# Until Alice has filled the queue.
HEAD_START = 2.0
# Of the histogram that observes every forward.
FORWARDS = "embedder_batch_tokens_count"
Request = tuple[str, dict[str, Any]]


def bulk() -> list[Request]:
    """Alice's requests: 4 to 16 texts of 16 to 500 tokens, every fourth to rerank."""
    requests: list[Request] = []
    for seed, count in zip(range(24), itertools.cycle([4, 8, 16]), strict=False):
        texts = draw_texts(MIXED, count, seed)
        if seed % 4 == 3:
            requests.append(("/rerank", {"query": texts[0][:100], "passages": texts[1:]}))
        else:
            body = {"sentences": texts, "return_colbert": seed % 8 == 0}
            requests.append(("/embeddings/", body))
    return requests


@dataclass(slots=True)
class Seen:
    """What became of one client's requests."""

    statuses: Counter[int] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)
    timings: list[dict[str, float]] = field(default_factory=list)
    waited_for: list[float] = field(default_factory=list)

    async def send(self, client: httpx2.AsyncClient, request: Request) -> None:
        """Send one and note its end; 0 stands for no answer."""
        began = time.perf_counter()
        try:
            response = await client.post(request[0], json=request[1])
        except httpx2.TransportError:
            self.statuses[0] += 1
            return
        self.statuses[response.status_code] += 1
        if response.status_code == 200:
            self.latencies.append(time.perf_counter() - began)
            self.timings.append(response.json()["timings_ms"])


async def be_alice(url: str, seconds: float) -> Seen:
    """Three hundred connections for some seconds; what is answered later does not count."""
    seen, requests = Seen(), bulk()

    async def keep_sending(first: int) -> None:
        for number in itertools.count(first):
            await seen.send(client, requests[number % len(requests)])

    async with connect(url, ALICE, CONNECTIONS) as client:
        tasks = [asyncio.create_task(keep_sending(number)) for number in range(CONNECTIONS)]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return seen


async def be_bob(url: str, seconds: float) -> Seen:
    """One request after the other for some seconds."""
    seen = Seen()
    body = {"sentences": [SENTENCE], "return_colbert": False}
    until = time.monotonic() + seconds
    async with connect(url, BOB, 1) as client:
        while time.monotonic() < until:
            before = await forwards_done(client)
            await seen.send(client, ("/embeddings/", body))
            seen.waited_for.append(await forwards_done(client) - before)
    return seen


async def forwards_done(client: httpx2.AsyncClient) -> float:
    """How many forwards the server has done so far."""
    lines = (await client.get("/metrics")).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(FORWARDS))


def connect(url: str, token: str, connections: int) -> httpx2.AsyncClient:
    """A client that presents a token."""
    limits = httpx2.Limits(max_connections=connections)
    headers = {"Authorization": f"Bearer {token}"}
    return httpx2.AsyncClient(base_url=url, timeout=120, limits=limits, headers=headers)


def alice(url: str, seconds: float) -> Seen:
    """`be_alice`, for a process of its own."""
    return asyncio.run(be_alice(url, seconds))


def run(options: argparse.Namespace, folder: Path, processes: Executor) -> bool:
    """Measure and report; whether this checkout's server kept its promise to Bob."""
    (folder / "tokens").write_text(f"alice:{ALICE}\nbob:{BOB}\n")
    trees = {"now": REPOSITORY} | ({"before": options.before.resolve()} if options.before else {})
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(start(folder, options.folder or folder / "model", tree))
            for name, tree in trees.items()
        }
        for server in servers.values():
            server.wait_until_healthy()
        alone: dict[str, list[float]] = {name: [] for name in servers}
        for _, name in turns(dict.fromkeys(servers, options.rounds)):
            alone[name].append(measure_alone(servers[name], options.seconds, processes))
        report_alone(alone)
        kept = [beside(name, server, options, processes) for name, server in servers.items()]
    return kept[0]


def start(folder: Path, model: Path, tree: Path) -> AbstractContextManager[RunningServer]:
    """A server of a checkout."""
    return run_server(
        folder,
        EMBEDDING_MODEL=str(model.resolve()),
        API_TOKENS_FILE=str(folder / "tokens"),
        PYTHONPATH=str(tree),
    )


def measure_alone(server: RunningServer, seconds: float, processes: Executor) -> float:
    """Tokens a second with Alice alone, once she has filled the queue."""
    hers = processes.submit(alice, server.url, seconds + 2 * HEAD_START)
    time.sleep(HEAD_START)
    tokens, began = computed_tokens(server), time.perf_counter()
    time.sleep(seconds)
    rate = (computed_tokens(server) - tokens) / (time.perf_counter() - began)
    hers.result()
    wait_until_idle(server)
    return rate


def computed_tokens(server: RunningServer) -> float:
    """Tokens that the server's forwards have read so far, of all models."""
    lines = httpx2.get(f"{server.url}/metrics", timeout=60).text.splitlines()
    series = [line for line in lines if line.startswith("embedder_tokens_processed_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in series)


def wait_until_idle(server: RunningServer) -> None:
    """What was sent before must not weigh on what is measured next."""
    server.wait_for_metric("embedding_active_requests", 0)
    server.wait_for_metric("rerank_active_requests", 0)


def report_alone(alone: dict[str, list[float]]) -> None:
    """Alice's throughput without Bob, and its ratio to the older server's."""
    for name, rates in alone.items():
        rounds = " ".join(f"{rate:.0f}" for rate in rates)
        print(f"Alice alone, {name:7} {statistics.median(rates):8.0f} tokens/s  ({rounds})")
    if "before" in alone:
        ratios = [now / before for now, before in zip(alone["now"], alone["before"], strict=True)]
        rounds = " ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"Alice alone, ratio   {statistics.median(ratios):8.2f}           ({rounds})")


def beside(
    name: str, server: RunningServer, options: argparse.Namespace, processes: Executor
) -> bool:
    """Both at once; whether all of Bob's were answered, 99 of 100 within three forwards."""
    hers = processes.submit(alice, server.url, options.seconds + 2 * HEAD_START)
    time.sleep(HEAD_START)
    his = asyncio.run(be_bob(server.url, options.seconds))
    loads = hers.result()
    wait_until_idle(server)
    sent, answered = sum(his.statuses.values()), his.statuses[200]
    print(f"Beside each other, {name}: Bob {answered} of {sent} answered {dict(his.statuses)}")
    print(f"  Alice's answers {dict(loads.statuses)}")
    if not answered:
        return False
    report_bob(his)
    return answered == sent and bool(np.percentile(his.waited_for, 99) <= MOST_FORWARDS)


def report_bob(his: Seen) -> None:
    """His waits, in forwards done meanwhile and in the time of one; and where the longest went."""
    forward = float(np.median([each["inference"] for each in his.timings])) / 1000
    p50, p99 = np.percentile(his.latencies, [50, 99]) / forward
    print(f"  a forward {forward:.3f} s, Bob's P50 {p50:.2f} and P99 {p99:.2f} times that")
    p50, p99 = np.percentile(his.waited_for, [50, 99])
    print(f"  forwards done while he waited: P50 {p50:.0f}, P99 {p99:.0f}")
    slowest = sorted(zip(his.latencies, his.timings, strict=True), key=lambda each: -each[0])
    for seconds, timings in slowest[:3]:
        stages = ", ".join(f"{name} {ms / 1000:.3f}" for name, ms in timings.items())
        print(f"  a slow one: {seconds:.3f} s; in the server {stages}")


def main() -> int:
    """Run it; 1 where this checkout's server did not keep its promise to Bob."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", help="a checkpoint of bge-m3's shape")
    parser.add_argument(
        "--seconds", type=float, default=20, help="seconds of each measurement (%(default)g)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of each case (%(default)s)")
    parser.add_argument("--before", type=Path, help="an older checkout, to compare with")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as scratch,
        ProcessPoolExecutor(1, get_context("spawn")) as processes,
    ):
        if options.folder is None:
            save_bge_m3(Path(scratch) / "model", SHAPES["two-layer"])
        processes.submit(bulk).result()  # It has imported everything then.
        return 0 if run(options, Path(scratch), processes) else 1


if __name__ == "__main__":
    sys.exit(main())
