"""Tokens a second over HTTP from one service process, by clients in processes of their own.

python -m benchmarks.gpu.http_rate FOLDER --device cuda
"""

import argparse
import asyncio
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from benchmarks.workload import Lengths, draw_texts
from tests.support.server import REPOSITORY, run_server

_LENGTH = 256
_TEXTS_IN_A_REQUEST = 32
_CONNECTIONS = 8
# Before the clock starts: every connection has sent at least one request by then.
_WARM_UP = 2.0
_KEPT = ("PYTHONPATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")


def bodies(texts: int) -> list[bytes]:
    """A few different requests for dense vectors."""
    drawn = draw_texts(Lengths(_LENGTH, _LENGTH), 4 * texts)
    dense_alone = {"return_sparse": False, "return_colbert": False}
    return [
        json.dumps({"sentences": drawn[start : start + texts]} | dense_alone).encode()
        for start in range(0, len(drawn), texts)
    ]


def client(url: str, texts: int, seconds: float) -> int:
    """Requests answered in time; raises for any other answer than 200."""
    requests, began, answered = bodies(texts), time.monotonic() + _WARM_UP, 0

    async def call_again_and_again(session: aiohttp.ClientSession, number: int) -> None:
        nonlocal answered
        while (now := time.monotonic()) < began + seconds:
            body = requests[number % len(requests)]
            async with session.post(f"{url}/embeddings/", data=body) as response:
                response.raise_for_status()
                await response.read()
            answered += now >= began and time.monotonic() < began + seconds
            number += 1

    async def run() -> None:
        headers = {"Content-Type": "application/json"}
        async with aiohttp.ClientSession(headers=headers) as session:
            calls = (call_again_and_again(session, first) for first in range(_CONNECTIONS))
            await asyncio.gather(*calls)

    asyncio.run(run())
    return answered


def measure(folder: Path, device: str, seconds: float, texts: int) -> dict[str, Any]:
    """Start a service, load it from several processes, and end it."""
    processes = max(1, min(6, (os.cpu_count() or 1) // 2))
    settings = {
        "EMBEDDING_MODEL": str(folder),
        "RERANKER_MODEL": "none",
        "DEVICE": device,
        "DTYPE": "auto",
        "RATE_LIMIT_REQUESTS_PER_MINUTE": "10000000",
        "RATE_LIMIT_BURST_SIZE": "10000000",
    }
    # Where packages lie in a folder of their own, the service needs them, too.
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    kept["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *filter(None, [kept.get("PYTHONPATH")])])
    with (
        TemporaryDirectory() as temporary,
        run_server(Path(temporary), **settings, **kept) as server,
    ):
        server.wait_until_healthy()
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            clients = [pool.submit(client, server.url, texts, seconds) for _ in range(processes)]
            answered = sum(each.result() for each in clients)
    requests = answered / seconds
    return {
        "tokens_per_text": _LENGTH,
        "connections": processes * _CONNECTIONS,
        "requests_per_second": requests,
        "texts_per_second": requests * texts,
        "tokens_per_second": requests * texts * _LENGTH,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--quick", action="store_true", help="small requests")
    arguments = parser.parse_args()
    texts = 1 if arguments.quick else _TEXTS_IN_A_REQUEST
    found = measure(arguments.folder.resolve(), arguments.device, arguments.seconds, texts)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
