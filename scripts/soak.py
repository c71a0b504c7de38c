"""Ten minutes of mixed traffic, good and bad, against a real server: does its memory stay?

    python -m scripts.soak --minutes 10 --folder /path/to/a/checkpoint

Without a folder it makes a tiny random checkpoint. Every ten seconds it prints what became of the
requests and the server's resident memory. It fails when a request was lost, or when the memory of
the last minute differs from that after the first minute by more than 3 %.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import psutil

from tests.faults.tally import Tally
from tests.support.checkpoints import save_m3
from tests.support.server import RunningServer, run_server

CLIENTS = 3
SECONDS_BETWEEN_REQUESTS = 0.25
SECONDS_BETWEEN_LINES = 10.0
MOST_GROWTH = 0.03
WORDS = ["search", "vector", "river", "bread", "жизнь", "检索", "مرحبا", "naïve", "👍", "hybrid"]
KINDS = ("dense", "sparse", "colbert")
COUNTLESS_NUMBERS = b'{"sentences":[' + b"1," * 500_000 + b"1]}"


@dataclass
class Soak:
    """The traffic of one run, and what was measured of it."""

    server: RunningServer
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    tally: Tally = field(default_factory=Tally)
    samples: list[tuple[float, int]] = field(default_factory=list)

    def text(self, most_words: int = 60) -> str:
        """A text of up to so many words."""
        return " ".join(self.rng.choices(WORDS, k=self.rng.randint(0, most_words)))

    async def post(self, client: httpx2.AsyncClient, path: str, content: bytes) -> None:
        """Send a body and note its status; without an answer it stays lost."""
        try:
            response = await client.post(
                path, content=content, headers={"Content-Type": "application/json"}
            )
        except httpx2.TransportError as error:
            print(f"lost: {error!r}", file=sys.stderr)
            self.tally.sent += 1
            return
        self.tally.note(response.status_code)

    async def embed(self, client: httpx2.AsyncClient) -> None:
        """Some texts, some kinds."""
        wanted: dict[str, object] = {f"return_{kind}": self.rng.random() < 0.6 for kind in KINDS}
        texts = [self.text() for _ in range(self.rng.randint(1, 8))]
        body = wanted | {"sentences": texts, "sparse_as_indices": self.rng.random() < 0.5}
        await self.post(client, "/embeddings/", json.dumps(body).encode())

    async def rerank(self, client: httpx2.AsyncClient) -> None:
        """A query and some passages."""
        body = {"query": self.text() or "q", "passages": [self.text() for _ in range(6)]}
        await self.post(client, "/rerank", json.dumps(body).encode())

    async def send_much(self, client: httpx2.AsyncClient) -> None:
        """A large body with a large answer: a few megabytes each."""
        body = {"sentences": [self.text(12) + "." * 4096 for _ in range(128)]}
        await self.post(client, "/embeddings/", json.dumps(body).encode())

    async def send_rubbish(self, client: httpx2.AsyncClient) -> None:
        """A body that is refused."""
        bodies = [b"", b"{", b"[" * 100_000, b'{"sentences":[]}', COUNTLESS_NUMBERS]
        await self.post(client, "/embeddings/", self.rng.choice(bodies))

    async def leave(self, _client: httpx2.AsyncClient) -> None:
        """A client that leaves within its body, or before its answer."""
        host, port = self.server.url.removeprefix("http://").split(":")
        body = json.dumps({"sentences": [self.text() for _ in range(16)]}).encode()
        head = (
            "POST /embeddings/ HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + body[: self.rng.choice([0, len(body) // 2, len(body)])])
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        self.tally.leave()

    async def look(self, client: httpx2.AsyncClient) -> None:
        """What operators ask for."""
        for path in ("/health", "/metrics", "/stats"):
            self.tally.note((await client.get(path)).status_code)

    async def run_client(self, number: int, until: float) -> None:
        """One client: a request, a pause, and again."""
        kinds: list[Callable[[httpx2.AsyncClient], Awaitable[None]]] = [
            self.embed,
            self.rerank,
            self.embed,
            self.leave,
            self.send_rubbish,
            self.embed,
            self.rerank,
            self.look,
        ]
        async with httpx2.AsyncClient(base_url=self.server.url, timeout=60) as client:
            for turn in itertools.count(number):
                if time.monotonic() > until:
                    return
                much = turn % 40 == 0
                await (self.send_much if much else kinds[turn % len(kinds)])(client)
                await asyncio.sleep(SECONDS_BETWEEN_REQUESTS)

    async def report(self, started: float, until: float) -> None:
        """A line every ten seconds."""
        process = psutil.Process(self.server.process.pid)
        while time.monotonic() < until:
            await asyncio.sleep(SECONDS_BETWEEN_LINES)
            passed, resident = time.monotonic() - started, process.memory_info().rss
            self.samples.append((passed, resident))
            print(f"{passed:6.0f} s  {resident / 2**20:8.1f} MiB  {self.tally}", flush=True)

    async def run(self, minutes: float) -> None:
        """All clients at once until the time is over."""
        started = time.monotonic()
        until = started + minutes * 60
        clients = [self.run_client(number, until) for number in range(0, CLIENTS * 13, 13)]
        await asyncio.gather(self.report(started, until), *clients)


def growth(samples: list[tuple[float, int]]) -> float:
    """How much larger the last minute is than the second, as a fraction; medians of each."""
    end = samples[-1][0]
    second = [size for passed, size in samples if 55 <= passed <= 120]
    last = [size for passed, size in samples if passed > end - 60]
    if not second:
        return 0.0
    return statistics.median(last) / statistics.median(second) - 1


def main() -> int:
    """Run it; 1 when a request was lost or the memory did not stay."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--minutes", type=float, default=10, help="minutes of traffic (%(default)g)"
    )
    parser.add_argument("--folder", type=Path, help="a checkpoint of bge-m3's shape")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or save_m3(Path(scratch) / "tiny")
        limits = {"RATE_LIMIT_REQUESTS_PER_MINUTE": "100000", "RATE_LIMIT_BURST_SIZE": "100000"}
        settings = {"EMBEDDING_MODEL": str(folder.resolve()), "LOG_FORMAT": "json"} | limits
        with run_server(Path(scratch), **settings) as server:
            server.wait_until_healthy()
            soak = Soak(server)
            asyncio.run(soak.run(options.minutes))
    grown = growth(soak.samples)
    print(f"{soak.tally}\nmemory grew by {grown:+.1%} since the second minute")
    return 1 if soak.tally.lost or abs(grown) > MOST_GROWTH else 0


if __name__ == "__main__":
    sys.exit(main())
