"""What one hostile client costs: the server's memory, /health, and a normal client beside it.

    python -m scripts.attacks --seconds 10 --tree ../another-checkout

Each attack meets a server of its own on loopback, from an address of its own, for a bounded time
and with bounded bodies. A normal client sends one sentence after the other meanwhile. It prints a
row of a table in Markdown for each attack; nothing fails, the figures are for people.
"""

import argparse
import json
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import numpy as np
import psutil

from tests.faults.raw import head
from tests.faults.tally import GOOD
from tests.support.checkpoints import save_m3, save_qwen
from tests.support.server import REPOSITORY, RunningServer, run_server

ATTACKER = "127.0.0.2"
MIB = 2**20
SMALL_BODIES = 2_000_000
# Together these and the rest are just more than the bodies that all clients may hold.
STALLED_UPLOADS = 16
THE_REST = 50_000
PATIENCE = 60.0
Settings = dict[str, str]


@dataclass(slots=True)
class Beside:
    """What was seen of the server while it was attacked."""

    healths: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    slowest: float = 0.0
    before: int = 0
    peak: int = 0
    after: int = 0


@dataclass(frozen=True, slots=True)
class Attack:
    """What is done to a server that was started with these settings."""

    name: str
    run: Callable[[RunningServer, float], None]
    settings: Settings = field(default_factory=dict)


def connect(server: RunningServer, receive_buffer: int | None = None) -> socket.socket:
    """A connection from the attacker's address."""
    host, port = server.url.removeprefix("http://").split(":")
    raw = socket.socket()
    if receive_buffer is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    raw.bind((ATTACKER, 0))
    raw.settimeout(1)
    raw.connect((host, int(port)))
    return raw


def send_ahead(server: RunningServer, seconds: float, request: bytes) -> None:
    """The same request again and again, while the answers are read and thrown away."""
    until = time.monotonic() + seconds
    with connect(server) as raw:
        reader = threading.Thread(target=read_away, args=(raw, until))
        reader.start()
        with suppress(OSError):
            while time.monotonic() < until:
                with suppress(TimeoutError):
                    raw.send(request * 500)
        reader.join()


def read_away(raw: socket.socket, until: float) -> None:
    """Take what comes."""
    while time.monotonic() < until:
        with suppress(TimeoutError):
            try:
                if not raw.recv(MIB):
                    return
            except ConnectionError:
                return


def pipeline(server: RunningServer, seconds: float) -> None:
    """Requests without a token that are answered with 200."""
    send_ahead(server, seconds, b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")


def pipeline_refused(server: RunningServer, seconds: float) -> None:
    """Requests without a token that are answered with 401."""
    send_ahead(server, seconds, b"GET /stats HTTP/1.1\r\nHost: x\r\n\r\n")


def post(server: RunningServer, path: str, body: object) -> None:
    """One request from the attacker's address; whatever it is answered."""
    content = json.dumps(body, ensure_ascii=False).encode()
    with connect(server) as raw, suppress(OSError):
        raw.settimeout(PATIENCE)
        raw.sendall(head(len(content), path) + content)
        print(f"  {len(content) / MIB:.1f} MiB: {raw.recv(12).decode()}", flush=True)


def ligatures(server: RunningServer, _seconds: float) -> None:
    """2.9 MiB of a character that normalisation makes eighteen times as long."""
    body = {"sentences": ["\ufdfa" * 1_000_000], "return_colbert": False}
    post(server, "/embeddings/", body)


def full_stops(server: RunningServer, _seconds: float) -> None:
    """16 MiB without a letter."""
    post(server, "/embeddings/", {"sentences": [". " * (8 * MIB)], "return_colbert": False})


def long_query(server: RunningServer, _seconds: float) -> None:
    """70 KiB: a long query, and many passages that it is joined with."""
    post(server, "/rerank", {"query": "search " * 9_500, "passages": ["a"] * 1000})


def unread_answers(server: RunningServer, seconds: float) -> None:
    """Two clients that ask for more than all may hold and do not read it."""
    body = json.dumps({"sentences": ["search vector " * 50] * 600}).encode()
    with ExitStack() as stack:
        for _ in range(2):
            raw = stack.enter_context(connect(server, receive_buffer=4096))
            raw.settimeout(PATIENCE)
            raw.sendall(head(len(body)) + body)
            with suppress(OSError):
                raw.recv(12)  # It is there now, and the rest is not taken.
        time.sleep(seconds)


def stalled_uploads(server: RunningServer, seconds: float) -> None:
    """Bodies that come up to their last bytes, and then no farther."""
    size = SMALL_BODIES - 1000
    with ExitStack() as stack:
        for sent in [*[size - 20] * STALLED_UPLOADS, THE_REST]:
            raw = stack.enter_context(connect(server))
            raw.settimeout(PATIENCE)
            with suppress(OSError):
                raw.sendall(head(size) + b'{"sentences":["' + b"x" * sent)
        time.sleep(seconds)


def attacks(m3: Path, qwen: Path) -> list[Attack]:
    """All of them."""
    plain = {"EMBEDDING_MODEL": str(m3), "MAX_BATCH_TOKENS": "2048"}
    locked = plain | {"API_TOKEN": "a-token-of-the-attacks-script", "PROTECT_METRICS": "true"}
    # The length that the launcher sets on a CPU: one longer forward would hold up everybody.
    reranker = plain | {"RERANKER_MODEL": str(qwen), "QWEN_RERANK_MAX_LENGTH": "2048"}
    small = plain | {"MAX_BODY_BYTES": str(SMALL_BODIES)}
    return [
        Attack("requests sent ahead, answered 200", pipeline, plain),
        Attack("requests sent ahead, answered 401", pipeline_refused, locked),
        Attack("2.9 MiB of U+FDFA", ligatures, plain),
        Attack("16 MiB of full stops", full_stops, plain),
        Attack("a query of 65 KiB, 1,000 passages", long_query, reranker),
        Attack("two answers that nobody reads", unread_answers, small),
        Attack("seventeen uploads that stall", stalled_uploads, small),
    ]


@contextmanager
def watched(server: RunningServer, settings: Settings) -> Iterator[Beside]:
    """Look at the memory and ask as others would, until the block ends."""
    seen, over = Beside(before=resident(server)), threading.Event()
    works = (look_at_memory, ask_health, be_normal)
    token = settings.get("API_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    threads = [threading.Thread(target=each, args=(server, seen, over, headers)) for each in works]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        over.set()
        for thread in threads:
            thread.join()
        seen.after = resident(server)


def resident(server: RunningServer) -> int:
    """Resident memory in bytes."""
    return int(psutil.Process(server.process.pid).memory_info().rss)


def look_at_memory(
    server: RunningServer, seen: Beside, over: threading.Event, _headers: dict[str, str]
) -> None:
    """Its peak."""
    while not over.wait(0.05):
        seen.peak = max(seen.peak, resident(server))


def ask_health(
    server: RunningServer, seen: Beside, over: threading.Event, _headers: dict[str, str]
) -> None:
    """How long /health takes."""
    with httpx2.Client(base_url=server.url, timeout=PATIENCE) as client:
        while not over.wait(0.02):
            began = time.perf_counter()
            client.get("/health")
            seen.healths.append(time.perf_counter() - began)


def be_normal(
    server: RunningServer, seen: Beside, over: threading.Event, headers: dict[str, str]
) -> None:
    """One sentence after the other; 0 stands for no answer."""
    with httpx2.Client(base_url=server.url, timeout=PATIENCE, headers=headers) as client:
        while not over.wait(0.02):
            began = time.perf_counter()
            try:
                status = client.post("/embeddings/", json=GOOD).status_code
            except httpx2.TransportError:
                status = 0
            seen.statuses[status] += 1
            seen.slowest = max(seen.slowest, time.perf_counter() - began)


def row(attack: Attack, seen: Beside) -> str:
    """One row of the table."""
    health = np.percentile(seen.healths, 99) * 1000
    normal = ", ".join(f"{count} x {status}" for status, count in sorted(seen.statuses.items()))
    memory = f"{seen.before / MIB:.0f} | {seen.peak / MIB:.0f} | {seen.after / MIB:.0f}"
    return f"| {attack.name} | {memory} | {health:.0f} | {normal}, slowest {seen.slowest:.1f} s |"


def main() -> None:
    """Run every attack."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--seconds", type=float, default=10, help="seconds of each lasting attack (%(default)g)"
    )
    parser.add_argument("--tree", type=Path, default=REPOSITORY, help="the checkout to attack")
    parser.add_argument("--only", default="", help="run the attacks with this in their name")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for attack in attacks(save_m3(folder / "m3"), save_qwen(folder / "qwen")):
            if options.only not in attack.name:
                continue
            path = str(options.tree.resolve())
            with run_server(folder, PYTHONPATH=path, **attack.settings) as server:
                server.wait_until_healthy()
                with watched(server, attack.settings) as seen:
                    attack.run(server, options.seconds)
            print(row(attack, seen), flush=True)


if __name__ == "__main__":
    main()
