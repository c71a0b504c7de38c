"""Short measurements of a service: requests of growing size alone, then some at a time."""

import os
import secrets
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from http import HTTPStatus
from itertools import product
from tempfile import TemporaryFile
from typing import Any

import httpx2
import numpy as np

from tools.capacity.cost import MeasuredTime, PlanError, TimeTable, fit
from tools.service import EMBED, Service, sums_of
from tools.service import RERANK as RERANK_PATH

_START_SECONDS = 900.0
_END_SECONDS = 60.0
# A measurement comes from one address.
_UNLIMITED = {
    "LOG_FORMAT": "console",
    "RATE_LIMIT_REQUESTS_PER_MINUTE": "1000000",
    "RATE_LIMIT_BURST_SIZE": "1000000",
}
RERANK = "rerank"
_KINDS = ("dense", "sparse", "colbert")
_WORDS = ("river", "winter", "copper", "engine", "letter", "garden", "signal", "market", "paper")
_LENGTHS = (8, 32, 96, 224, 448)
_TEXTS = (1, 4, 16)
_MOST_TOKENS = 2048
# Each shape until so many seconds are gone, but often enough for a median.
_SECONDS = 0.4
_FEWEST, _MOST = 5, 40
_AT_ONCE = 4
_ROUNDS = 8


@contextmanager
def started_service() -> Iterator[tuple[str, str]]:
    """Start `python -m smart_embedder` with the settings in force; its address and a token of it.

    Raises `PlanError` where it does not become ready.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    url, command = f"http://127.0.0.1:{port}", [sys.executable, "-m", "smart_embedder"]
    # In place of one that the settings ask for.
    token = secrets.token_urlsafe()
    own = {"HOST": "127.0.0.1", "PORT": port, "API_TOKEN": token} | _UNLIMITED
    with TemporaryFile() as printed:
        process = subprocess.Popen(
            command, env=os.environ | own, stdout=printed, stderr=subprocess.STDOUT
        )
        try:
            until = time.monotonic() + _START_SECONDS
            while not _is_ready(url):
                if process.poll() is not None or time.monotonic() > until:
                    printed.seek(0)
                    last = printed.read().decode(errors="replace").strip().rpartition("\n")[2]
                    raise PlanError(f"the service did not start: {last}")
                time.sleep(0.1)
            yield url, token
        finally:
            process.terminate()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _is_ready(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/health").status_code == HTTPStatus.OK
    except httpx2.HTTPError:
        return False


class Client(Service):
    """Sends requests for one kind of work: `rerank`, or kinds of vectors joined by commas."""

    def __init__(self, url: str, kinds: str, token: str | None = None) -> None:
        # Nothing is measured of a service that refuses some of what is sent.
        super().__init__(url, token, later=())
        self._kinds = kinds

    def send(self, texts: Sequence[str]) -> tuple[float, dict[str, Any]]:
        """Seconds and answer of a request; raises `ServiceError` where there is none."""
        path, body = EMBED, dict[str, Any](sentences=list(texts))
        body |= {f"return_{kind}": kind in self._kinds.split(",") for kind in _KINDS}
        if self._kinds == RERANK:
            path, body = RERANK_PATH, {"query": "river", "passages": list(texts)}
        began = time.perf_counter()
        answer = self.work(path, body)
        return time.perf_counter() - began, answer.json()

    def count_tokens(self, text: str) -> int:
        """The tokens that a request with this text alone reads."""
        return int(self.send([text])[1]["usage"]["total_tokens"])

    def forwards(self) -> tuple[float, int]:
        """Seconds of all forwards so far, and how many there were, from /metrics."""
        family = "rerank_inference" if self._kinds == RERANK else "embedding_gpu_inference"
        found = sums_of(self.get("/metrics").text)
        name = f"{family}_duration_seconds"
        if f"{name}_sum" not in found:
            raise PlanError("the service does not show its metrics (PROTECT_METRICS?)")
        return found[f"{name}_sum"], int(found[f"{name}_count"])


def measure(client: Client, kinds: str) -> TimeTable:
    """Measure a service that nobody else uses; some ten seconds."""
    print("measuring requests of growing size, then several at a time ...", file=sys.stderr)
    client.require_ready()
    gpu, most, times = client.health["gpu"], client.health["max_batch_tokens"], []
    random = np.random.default_rng(0)
    for texts, words in product(_TEXTS, _LENGTHS):
        # What does not fit one forward tells nothing of a forward.
        if texts == 1 or texts * words < min(most, _MOST_TOKENS):
            times.append(_median(client, random, texts, words))
    table = TimeTable(kinds, str(gpu["device_info"]), most, bool(gpu["available"]), times)
    return replace(table, interference=_interference(client, random, table))


def _text(random: np.random.Generator, words: int) -> str:
    """One that was not sent before: EMBEDDING_CACHE may keep vectors."""
    return " ".join(random.choice(_WORDS, words))


def _median(client: Client, random: np.random.Generator, texts: int, words: int) -> MeasuredTime:
    client.send([_text(random, words) for _ in range(texts)])
    until = time.perf_counter() + _SECONDS
    seen: list[tuple[float, ...]] = []
    while len(seen) < _FEWEST or (time.perf_counter() < until and len(seen) < _MOST):
        seconds, answer = client.send([_text(random, words) for _ in range(texts)])
        timings, tokens = answer["timings_ms"], answer["usage"]["total_tokens"]
        forward, tokenize = timings["inference"] / 1000, timings["tokenize"] / 1000
        seen.append((tokens / texts, forward, tokenize, max(0.0, seconds - forward - tokenize)))
    length, *medians = (statistics.median(column) for column in zip(*seen, strict=True))
    return MeasuredTime(texts, round(length), *medians)


def _interference(client: Client, random: np.random.Generator, table: TimeTable) -> float:
    """By how much a request beside a forward makes it longer, in seconds, while all are busy."""

    def send_all() -> list[int]:
        texts = [[_text(random, words)] for words in range(8, 40)]
        return [told["usage"]["total_tokens"] for _, told in threads.map(client.send, texts)]

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        send_all()
        before, forwards_before = client.forwards()
        tokens = [each for _ in range(_ROUNDS) for each in send_all()]
        after, forwards = client.forwards()
    alone = fit(table).forward(tokens, forwards - forwards_before)
    return max(0.0, (after - before - alone) / len(tokens))
