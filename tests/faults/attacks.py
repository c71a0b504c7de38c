"""Attacks on a server with the default limits: its memory, and the wait of another client.

Limits of a single connection (sizes, order, upgrades) are in tests/app/test_connection.py.

An outcome is the status of a response, or 0 if the connection ended without one.
"""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.faults.raw import address_of, connect, head, read_status
from tests.support.checkpoints import save_m3
from tests.support.memory import reset_peak, status_bytes
from tests.support.server import RunningServer

MIB = 1 << 20
BODY_BYTES = 16 * MIB
# The memory that a request may take in addition to 20 times its body.
BESIDE = 50 * MIB
LIVE = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
WORDS = "search vector weight dense token "
# 9,000 tokens, of which models read 8,192.
LONG = WORDS * 1800
MANY = [f"{number} {WORDS * 90}" for number in range(500)]
SHORT = [f"{number}" for number in range(1024)]
SMALL = json.dumps({"sentences": ["search"], "return_colbert": False}).encode()
# The response holds 7 MB of vectors and is 18 MB of JSON.
LARGE = json.dumps({"sentences": ["search vector " * 50] * 64}).encode()
Outcomes = Counter[int]


@dataclass(frozen=True)
class Observation:
    """The result of an attack.

    `grown` is the growth of the server's memory in bytes, at its peak, and `longest_health` the
    longest response time of /health for another client, in seconds.
    """

    outcomes: Outcomes
    grown: int
    longest_health: float


@dataclass(frozen=True)
class Attack:
    """An attack, its allowed outcomes, and the memory that the server may take for it.

    If `counts` is set, the outcomes must be exactly these.
    """

    name: str
    run: Callable[[RunningServer], Outcomes]
    statuses: frozenset[int]
    most_memory: int
    counts: Outcomes | None = None

    def allows(self, seen: Observation) -> bool:
        """Return whether outcomes and memory are allowed."""
        has_counts = self.counts is None or seen.outcomes == self.counts
        has_statuses = seen.outcomes.keys() <= self.statuses
        return has_counts and has_statuses and seen.grown <= self.most_memory


def save_model(folder: Path) -> Path:
    """Save the model of the server, whose vectors of tokens are wide, so that few make a lot."""
    save_m3(folder)
    wide = torch.nn.Linear(64, 256)
    torch.save(wide.state_dict(), folder / "colbert_linear.pt")
    return folder


def observe(server: RunningServer, attack: Attack) -> Observation:
    """Attack the server; fails if /health ever is not 200."""
    pid = server.process.pid
    before = status_bytes(pid, "VmRSS")
    reset_peak(pid)
    host, port = address_of(server)
    watch = [sys.executable, "-S", str(Path(__file__).with_name("health_watch.py"))]
    with subprocess.Popen(
        [*watch, host, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as watcher:
        assert watcher.stdin is not None
        assert watcher.stdout is not None
        assert watcher.stdout.readline() == "watching\n"
        outcomes = attack.run(server)
        watcher.stdin.close()
        longest = float(watcher.stdout.read())
    return Observation(outcomes, status_bytes(pid, "VmHWM") - before, longest)


def slow_senders(server: RunningServer) -> Outcomes:
    """Connections that never complete their headers are closed, and unfinished bodies get 408."""
    body = padded(MIB)
    beginnings = [b"POST /embeddings/ HTTP/1.1\r\nHost: localh"] * 30 + [b"", b"\r\n"] * 10
    beginnings += [head(len(body)) + body[:-1]] * 50
    with ExitStack() as stack:
        raws = [stack.enter_context(connect(server)) for _ in beginnings]
        for raw, beginning in zip(raws, beginnings, strict=True):
            raw.sendall(beginning)
        return Counter(read_status(raw) for raw in raws)


def idle_connections(server: RunningServer) -> Outcomes:
    """Keep connections open without further requests."""
    outcomes = Outcomes()
    with ExitStack() as stack:
        for _ in range(200):
            raw = stack.enter_context(connect(server))
            raw.sendall(LIVE)
            outcomes[read_status(raw)] += 1
        with connect(server) as raw:
            raw.sendall(head(len(SMALL)) + SMALL)
            outcomes[read_status(raw)] += 1
    return outcomes


def many_large_bodies(server: RunningServer) -> Outcomes:
    """Send more bodies than fit: the rest gets 503."""
    body = padded(BODY_BYTES)

    def send(_: int) -> int:
        with connect(server) as raw:
            raw.sendall(head(len(body)) + body)
            return read_status(raw)

    with ThreadPoolExecutor(64) as threads:
        return Counter(threads.map(send, range(64)))


def unread_answers(server: RunningServer) -> Outcomes:
    """Request large responses without reading them; when the clients leave, memory is free."""
    with ExitStack() as stack, ThreadPoolExecutor(60) as threads:
        raws = [stack.enter_context(connect(server, receive_buffer=4096)) for _ in range(60)]

        def ask(raw: Any) -> int:
            raw.sendall(head(len(LARGE)) + LARGE)
            return int(raw.recv(12).split()[1])

        return Counter(threads.map(ask, raws))


def padded(size: int) -> bytes:
    """Return a body of this size with an unknown field, which is read whole and refused."""
    beginning, end = b'{"sentences":["search"],"padding":"', b'"}'
    return beginning + b" " * (size - len(beginning) - len(end)) + end


def posting(
    body: Callable[[], bytes], path: str = "/embeddings/"
) -> Callable[[RunningServer], Outcomes]:
    """Return an attack that sends one request, and reads the response."""

    def post(server: RunningServer) -> Outcomes:
        headers = {"Content-Type": "application/json"}
        with (
            server.client() as client,
            client.stream("POST", path, content=body(), headers=headers) as response,
        ):
            for _ in response.iter_raw():
                pass
        return Counter([response.status_code])

    return post


def _json(value: dict[str, Any]) -> Callable[[], bytes]:
    return lambda: json.dumps(value, ensure_ascii=False).encode()


_N = BODY_BYTES - 100
# Parsed before they were counted, these would block the event loop for 0.3 to 196 seconds.
_COUNTLESS: dict[str, Callable[[], bytes]] = {
    "millions of ints": lambda: b'{"sentences":[' + b"1," * (_N // 2) + b"1]}",
    "millions of empty texts": lambda: b'{"sentences":[' + b'"",' * (_N // 3) + b'""]}',
    "deep nesting": lambda: b'{"sentences":' + b"[" * _N,
    "unknown fields": lambda: b"{" + b",".join(b'"k%07d":1' % i for i in range(_N // 13)) + b"}",
    "a number of many digits": lambda: b'{"sentences":' + b"1" * _N + b"}",
}
_COSTLY: dict[str, tuple[str, dict[str, Any], int]] = {
    "tokens of ligatures": ("/tokenize", {"inputs": "ﷺ" * 150_000}, 422),
    "ColBERT as JSON": ("/embeddings/", {"sentences": MANY}, 422),
    "ColBERT in base64": ("/embeddings/", {"sentences": MANY, "encoding": "base64"}, 422),
    "muvera": ("/embeddings/", {"sentences": SHORT, "muvera": "document"}, 200),
    "pooled ColBERT": ("/embeddings/", {"sentences": [LONG], "colbert_pool_factor": 2}, 422),
    "two long texts": ("/rerank", {"query": LONG, "passages": [LONG]}, 200),
}


def attacks() -> Iterator[Attack]:
    """Yield all attacks."""

    def alone(name: str, run: Any, counts: dict[int, int], memory: int = BESIDE) -> Attack:
        return Attack(name, run, frozenset(counts), memory, Counter(counts))

    yield alone("slow headers and bodies", slow_senders, {0: 50, 408: 50}, 150 * MIB)
    yield alone("idle connections", idle_connections, {200: 201})
    yield Attack("64 bodies of 16 MiB", many_large_bodies, frozenset({422, 503}), 768 * MIB)
    yield Attack("60 unread answers", unread_answers, frozenset({200, 503}), 768 * MIB)
    for name, body in _COUNTLESS.items():
        yield alone(name, posting(body), {422: 1}, 3 * BODY_BYTES + BESIDE)
    for name, (path, value, status) in _COSTLY.items():
        body = _json(value)
        memory = 20 * len(body()) + BESIDE
        yield alone(name, posting(body, path), {status: 1}, memory)
