"""Several workers that share the cores, against one that has them all, and one that has its share.

    python -m benchmarks.cpu_workers FOLDER --workers 2 --rounds 5

The last two tell how much of the second worker's throughput is left, where its cores are there.
Each is a service of its own. They take turns on the same texts of 16 to 500 tokens, dense vectors
alone, because the speed of a shared machine drifts.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from pathlib import Path

import httpx2

from benchmarks.turns import turns
from benchmarks.workload import MIXED, draw_texts
from tests.support.server import RunningServer, run_server

_PATIENCE = 120.0
_CLIENTS = 4


async def seconds_of(server: RunningServer, texts: list[str]) -> float:
    """The texts as the requests of a few clients, dense vectors alone, which cost little JSON."""
    share = len(texts) // _CLIENTS
    began = time.perf_counter()
    async with httpx2.AsyncClient(base_url=server.url, timeout=_PATIENCE) as client:
        sent: list[Awaitable[httpx2.Response]] = [
            client.post(
                "/embeddings/",
                json={
                    "sentences": texts[first : first + share],
                    "return_sparse": False,
                    "return_colbert": False,
                },
            )
            for first in range(0, len(texts), share)
        ]
        for response in await asyncio.gather(*sent):
            response.raise_for_status()
    return time.perf_counter() - began


def setups(workers: int) -> dict[str, dict[str, str]]:
    """The variables of each service, by what it is called; the first is the one that is told of."""
    names = ",".join(f"cpu:{number}" for number in range(workers))
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    return {
        names: {"DEVICE": names},
        "cpu": {"DEVICE": "cpu"},
        f"cpu, {threads} thread": {"DEVICE": "cpu", "OMP_NUM_THREADS": str(threads)},
    }


async def compare(options: argparse.Namespace, scratch: Path) -> dict[str, list[float]]:
    """Seconds of every round, by what a service is called."""
    texts = draw_texts(MIXED, options.texts)
    folder = str(options.folder.resolve())
    async with AsyncExitStack() as stack:
        servers = {
            name: stack.enter_context(
                run_server(scratch, EMBEDDING_MODEL=folder, DTYPE=options.dtype, **variables)
            )
            for name, variables in setups(options.workers).items()
        }
        found: dict[str, list[float]] = {name: [] for name in servers}
        for server in servers.values():
            await asyncio.to_thread(server.wait_until_healthy)
            await seconds_of(server, texts)
        for _, name in turns(dict.fromkeys(servers, options.rounds)):
            found[name].append(await seconds_of(servers[name], texts))
    return found


def report(found: dict[str, list[float]], texts: int) -> None:
    """Texts a second, and how many times as fast the workers are, round by round."""
    several, *_ = found.values()
    for name, seconds in found.items():
        rounds = " ".join(f"{each:.2f}" for each in seconds)
        ratios = [other / own for other, own in zip(seconds, several, strict=True)]
        rate, ratio = texts / statistics.median(seconds), statistics.median(ratios)
        print(f"{name:16}{rate:8.2f} texts/s  ({rounds} s)  the workers: {ratio:.2f} times as fast")


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="a checkpoint of bge-m3's shape")
    parser.add_argument(
        "--workers", type=int, default=2, help="workers that share the cores (%(default)s)"
    )
    parser.add_argument("--texts", type=int, default=64, help="texts of a request (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each case (%(default)s)")
    parser.add_argument("--dtype", default="auto", help="the number format, as DTYPE (%(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = asyncio.run(compare(options, Path(scratch)))
    report(found, options.texts)


if __name__ == "__main__":
    main()
