"""What one hostile client costs: the server's memory, /health, and a normal client beside it.

    python -m scripts.attacks --seconds 10 --tree ../another-checkout --only "item 3"

Each attack meets a server of its own on loopback, from an address of its own, for a bounded time
and with bounded bodies. A normal client sends one sentence after the other meanwhile. It prints a
row of a table in Markdown for each attack; nothing fails, the figures are for people. The limits
are the defaults, but for the attacks that say otherwise. Beside the longest times stands what the
memory may rise by: 20 times the bodies that are in work at once, and 50 MiB for each.
"""

import argparse
import gzip
import json
import multiprocessing
import os
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPException, HTTPResponse
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path

import httpx2

from tests.faults.raw import head
from tests.faults.tally import GOOD
from tests.support.checkpoints import save_m3, save_qwen, save_reranker
from tests.support.server import REPOSITORY, RunningServer, run_server

ATTACKER = "127.0.0.2"
MIB = 2**20
SMALL_BODIES = 2_000_000
PATIENCE = 120.0
DEFAULT_LIMITS = {"RATE_LIMIT_REQUESTS_PER_MINUTE": "3600", "RATE_LIMIT_BURST_SIZE": "120"}
NDJSON = "application/x-ndjson"
# The character that normalisation makes eighteen times as long.
LIGATURES = "\ufdfa" * 300_000
Settings = dict[str, str]
Run = Callable[["RunningServer", float], None]


@dataclass(slots=True)
class Beside:
    """What others saw while the server was attacked: seconds, and statuses of the embeddings."""

    healths: list[float] = field(default_factory=list)
    embeddings: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Attack:
    """What is done to a server that was started with these settings, with bodies of these sizes."""

    name: str
    run: Run
    settings: Settings
    bodies: tuple[int, ...] = ()


def connect(server: RunningServer, receive_buffer: int | None = None) -> socket.socket:
    """A connection from the attacker's address."""
    host, port = server.url.removeprefix("http://").split(":")
    raw = socket.socket()
    if receive_buffer is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    raw.bind((ATTACKER, 0))
    raw.settimeout(PATIENCE)
    raw.connect((host, int(port)))
    return raw


def flood(
    server: RunningServer, seconds: float, *, block: bytes, first: bytes = b"", pause: float = 0
) -> None:
    """Send `first`, then `block` until the time is over; what comes back is thrown away."""
    until = time.monotonic() + seconds

    def read_away() -> None:
        with suppress(ConnectionError):
            while time.monotonic() < until:
                with suppress(TimeoutError):
                    if not raw.recv(MIB):
                        return

    # With a pause they go out one by one.
    blocks = memoryview(block if pause else block * max(1, MIB // len(block)))
    sent = 0
    with connect(server) as raw:
        raw.sendall(first)
        raw.settimeout(1)
        reader = threading.Thread(target=read_away)
        reader.start()
        with suppress(OSError):
            while time.monotonic() < until:
                with suppress(TimeoutError):
                    sent += raw.send(blocks[sent % len(blocks) :])
                time.sleep(pause)
        reader.join()
    print(f"  {sent / MIB:.1f} MiB sent", flush=True)


def stream(
    name: str, block: bytes, settings: Settings, *, first: bytes = b"", headers: str = ""
) -> Attack:
    """A stream that begins with `first` and goes on with `block`; a single byte comes slowly."""
    raw_head = (
        "POST /embeddings/stream?return_sparse=false&return_colbert=false HTTP/1.1\r\n"
        f"Host: localhost\r\nContent-Type: {NDJSON}\r\n{headers}Transfer-Encoding: chunked\r\n\r\n"
    )
    begun = raw_head.encode() + (_chunk(first) if first else b"")
    pause = 0.001 if len(block) == 1 else 0
    run = partial(flood, block=_chunk(block), first=begun, pause=pause)
    return Attack(name, run, settings, (len(first) or len(block),))


def _chunk(content: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(content), content)


def lines(name: str, line: bytes, settings: Settings) -> Attack:
    """A stream of one line again and again."""
    return stream(name, line * max(1, 60_000 // len(line)), settings)


def unfinished(
    server: RunningServer, seconds: float, *, contents: list[bytes], receive_buffer: int | None
) -> None:
    """Clients that send so much and no more, and read no more than the beginning of an answer."""
    with ExitStack() as stack:
        for content in contents:
            raw = stack.enter_context(connect(server, receive_buffer))
            with suppress(OSError):
                raw.sendall(content)
                if receive_buffer is not None:
                    raw.recv(12)  # The answer is there now, and the rest is not taken.
        time.sleep(seconds)


@dataclass(frozen=True, slots=True)
class Request:
    """One request; `size` is that of its body, unpacked."""

    content: bytes
    size: int = 0


def request(
    path: str,
    body: object = b"",
    *headers: tuple[str, str],
    method: str = "POST",
    kind: str = "application/json",
    packed: bool = False,
) -> Request:
    """A request with a body of bytes, or of whatever JSON can hold."""
    content = body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()
    size = len(content)
    sent = [("Host", "localhost"), ("Content-Type", kind), *headers]
    if packed:
        content = gzip.compress(content)
        sent.append(("Content-Encoding", "gzip"))
    sent.append(("Content-Length", str(len(content))))
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in sent), "", ""]
    return Request("\r\n".join(lines).encode() + content, size)


packed = partial(request, packed=True)


def ask(raw: socket.socket, content: bytes) -> int:
    """Send a request and read its answer whole; its status, or 0 where the connection ends."""
    try:
        raw.sendall(content)
        answer = HTTPResponse(raw)
        answer.begin()
        while answer.read(MIB):
            pass
    except (OSError, HTTPException):
        return 0
    return answer.status


def together(
    server: RunningServer, seconds: float, *, content: bytes, connections: int, again: bool
) -> None:
    """A request on each of so many connections at once; again and again where that is asked for."""
    until = time.monotonic() + seconds

    def one(_: int) -> list[int]:
        statuses: list[int] = []
        while not statuses or (again and time.monotonic() < until):
            with connect(server) as raw:
                statuses.append(ask(raw, content))
                # A status of 0: the server has closed it.
                while again and statuses[-1] and time.monotonic() < until:
                    statuses.append(ask(raw, content))
        return statuses

    began = time.monotonic()
    with ThreadPoolExecutor(connections) as threads:
        statuses = Counter(chain.from_iterable(threads.map(one, range(connections))))
    print(f"  {dict(sorted(statuses.items()))} in {time.monotonic() - began:.1f} s", flush=True)


def once(
    name: str, asked: Request, settings: Settings, connections: int = 1, *, again: bool = False
) -> Attack:
    """A request on each of some connections, until they are answered."""
    run = partial(together, content=asked.content, connections=connections, again=again)
    return Attack(name, run, settings, (asked.size,) * connections)


again = partial(once, again=True)


def many_names(size: int) -> dict[str, int]:
    """About so many bytes of fields that no schema has."""
    return {f"return_{i:05}": 0 for i in range(size // 19)}


def item_1(plain: Settings, labels: Settings) -> Iterator[Attack]:
    """Texts that become long, on every route that reads texts."""
    long, usual = LIGATURES, "\ufdfa" * 999_000
    bodies = {
        "/tokenize": {"inputs": long},
        "/embed_all": {"inputs": long, "truncate": True},
        "/embed": {"inputs": long, "truncate": True},
        "/embed_sparse": {"inputs": long, "truncate": True},
        "/similarity": {
            "inputs": {"source_sentence": long, "sentences": [long]},
            "parameters": {"truncate": True},
        },
        "/v1/embeddings": {"input": long},
        "/v2/embed": {"texts": [long]},
        "/embeddings/": {"sentences": [long]},
        "/rerank": {"query": long, "passages": [long]},
        "/score": {"text_1": long, "text_2": [long]},
        "/decode": {"ids": [[index % 200 + 5 for index in range(12_000)]]},
    }
    yield once("item 1: /tokenize, 999,000 U+FDFA", packed("/tokenize", {"inputs": usual}), plain)
    for path, body in bodies.items():
        yield once(f"item 1: {path}, 300,000 U+FDFA", packed(path, body), plain)
    body = {"inputs": [[long, long]], "truncate": True}
    yield once("item 1: /predict, 300,000 U+FDFA", packed("/predict", body), labels)
    texts = {"inputs": ["a b c d " * 120] * 1000}
    yield once("item 1: /tokenize, 1,000 texts of letters", packed("/tokenize", texts), plain)


def item_3(plain: Settings) -> Iterator[Attack]:
    """Streams whose lines take long."""
    unlimited = plain | dict.fromkeys(DEFAULT_LIMITS, "1000000")
    names = b'{"text": "a", %b\n' % json.dumps(many_names(64_000)).encode()[1:]
    nested = b'{"text": "a", "id": [' + b"[]," * 21_000 + b"[]]}\n"
    blanks = b" " * 33_000_000
    yield stream("item 3: 32 MB of blanks, then one by one", b" ", plain, first=blanks)
    yield lines("item 3: lines of many names", names, plain)
    yield lines("item 3: lines with a nested id", nested, plain)
    for line in (b"}\n", b"1\n", b"{}\n", b"[\n"):
        shown = line.decode().strip()
        yield lines(f"item 3: lines of {shown}", line, plain)
        yield lines(f"item 3: lines of {shown}, no rate limit", line, unlimited)


def item_4(plain: Settings) -> Iterator[Attack]:
    """Gzip of members that hold nothing, or a blank."""
    zipped = ("Content-Encoding", "gzip")
    for what, text in (("empty", b""), ("tiny", b" ")):
        member = gzip.compress(text, mtime=0)
        asked = request("/embeddings/", member * (20_000_000 // len(member)), zipped)
        for connections in (1, 4):
            name = f"item 4: 20 MB of {what} members, {connections} at once"
            yield again(name, asked, plain, connections)
        header = "Content-Encoding: gzip\r\n"
        yield stream(f"item 4: a stream of {what} members", member * 3000, plain, headers=header)


def item_5(plain: Settings) -> Iterator[Attack]:
    """Headers, queries and lists that take their parser long."""
    inner, names = "(" + "a " * 30_000 + ")", "&".join(f"{i:x}" for i in range(12_000))
    yield again(
        "item 5: a Content-Type of 62,500 semicolons",
        request("/embeddings/", GOOD, kind='application/json; a="' + ";" * 62_500),
        plain,
    )
    streamed = request(f"/embeddings/stream?{names}", b'"a"\n', kind=NDJSON)
    yield again("item 5: 12,000 names in the query of a stream", streamed, plain)
    health = request(f"/health?{'a&' * 30_000}", method="GET")
    yield again("item 5: 30,000 names in the query of /health", health, plain, 8)
    yield again(
        "item 5a: GET / with an Accept of 60 KB, 8 at once",
        request("/", b"", ("Accept", inner), method="GET"),
        plain,
        8,
    )
    yield again(
        "item 5a: GET / with an Accept of 1,000 bytes, 8 at once",
        request("/", b"", ("Accept", inner[:999] + ")"), method="GET"),
        plain,
        8,
    )
    for name in ("Priority", "Accept-Encoding"):
        asked = request("/embeddings/", GOOD, (name, f"u=1, i={inner}"))
        yield again(f"item 5a: a {name} of 60 KB", asked, plain)
    types = {"texts": ["a"], "embedding_types": ["x"] * 16_000}
    yield once("item 5a: 16,000 bad embedding_types", packed("/v2/embed", types), plain, 60)
    fields = {"query": "a", "documents": ["b"], "rank_fields": [1] * 16_000}
    yield once("item 5a: 16,000 bad rank_fields", packed("/v2/rerank", fields), plain, 60)


def item_5b(plain: Settings) -> Iterator[Attack]:
    """Late interaction of as many queries as passages."""
    for tokens in (440, 8190):
        body = {"text_1": ["a " * tokens] * 1024, "text_2": ["b"] * 1024}
        yield once(
            f"item 5b: /score, 1,024 queries of {tokens} tokens", packed("/score", body), plain
        )


def attacks(folder: Path, model: Path | None) -> Iterator[Attack]:
    """All of them; `model` is the embedding model of those with default limits."""
    m3, qwen = save_m3(folder / "m3"), save_qwen(folder / "qwen")
    usual = {"EMBEDDING_MODEL": str(model or m3)} | DEFAULT_LIMITS
    yield Attack("nothing", lambda _server, seconds: time.sleep(seconds), usual)
    names = packed("/embeddings/", many_names(133_000))
    yield from item_1(usual, usual | {"RERANKER_MODEL": str(save_reranker(folder / "labels"))})
    yield once("item 2: 60 bodies of unknown names", names, usual, 60)
    yield from item_3(usual)
    yield from item_4(usual)
    yield from item_5(usual)
    yield from item_5b(usual)
    yield from earlier_attacks(m3, qwen)


def earlier_attacks(m3: Path, qwen: Path) -> list[Attack]:
    """Attacks on servers with limits of their own, without a rate limit."""
    plain = {"EMBEDDING_MODEL": str(m3), "MAX_BATCH_TOKENS": "2048"}
    locked = plain | {"API_TOKEN": "a-token-of-the-attacks-script", "PROTECT_METRICS": "true"}
    # The length that the launcher sets on a CPU: one longer forward would hold up everybody.
    reranker = plain | {"RERANKER_MODEL": str(qwen), "QWEN_RERANK_MAX_LENGTH": "2048"}
    small = plain | {"MAX_BODY_BYTES": str(SMALL_BODIES)}
    live, stats = (
        partial(flood, block=f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        for path in ("/health/live", "/stats")
    )
    dense = {"return_colbert": False}
    ligatures = request("/embeddings/", {"sentences": ["\ufdfa" * 1_000_000]} | dense)
    full_stops = request("/embeddings/", {"sentences": [". " * (8 * MIB)]} | dense)
    long_query = request("/rerank", {"query": "search " * 9_500, "passages": ["a"] * 1000})
    # Two clients ask for more than all may hold. Bodies come up to their last bytes: together
    # they are just more than what all clients may hold.
    large = request("/embeddings/", {"sentences": ["search vector " * 50] * 600}).content
    size = SMALL_BODIES - 1000
    uploads = [
        head(size) + b'{"sentences":["' + b"x" * sent for sent in [*[size - 20] * 16, 50_000]
    ]
    unread = partial(unfinished, contents=[large] * 2, receive_buffer=4096)
    stalled = partial(unfinished, contents=uploads, receive_buffer=None)
    return [
        Attack("requests sent ahead, answered 200", live, plain),
        Attack("requests sent ahead, answered 401", stats, locked),
        once("2.9 MiB of U+FDFA", ligatures, plain),
        once("16 MiB of full stops", full_stops, plain),
        once("a query of 65 KiB, 1,000 passages", long_query, reranker),
        Attack("two answers that nobody reads", unread, small),
        Attack("seventeen uploads that stall", stalled, small),
    ]


@contextmanager
def others(server: RunningServer, token: str | None) -> Iterator[Beside]:
    """Ask as others would until the block ends, in a process that no attacking thread holds up."""
    seen = Beside()
    ours, theirs = multiprocessing.Pipe()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    process = multiprocessing.get_context("fork").Process(
        target=be_beside, args=(server.url, headers, theirs)
    )
    process.start()
    try:
        yield seen
    finally:
        ours.send("over")
        found = ours.recv()
        process.join()
        seen.healths, seen.embeddings = found.healths, found.embeddings
        seen.statuses = found.statuses


def be_beside(url: str, headers: dict[str, str], end: Connection) -> None:
    """Ask until something comes from the other end, and send what was seen to it."""
    seen, over = Beside(), threading.Event()

    def keep_asking(method: str, path: str, body: object, took: list[float]) -> None:
        """One request after the other; 0 stands for no answer."""
        with httpx2.Client(base_url=url, timeout=PATIENCE, headers=headers) as client:
            while not over.wait(0.02):
                began = time.perf_counter()
                try:
                    status = client.request(method, path, json=body).status_code
                except httpx2.TransportError:
                    status = 0
                took.append(time.perf_counter() - began)
                if body is not None:
                    seen.statuses[status] += 1

    threads = [
        threading.Thread(target=keep_asking, args=each)
        for each in (
            ("GET", "/health", None, seen.healths),
            ("POST", "/embeddings/", GOOD, seen.embeddings),
        )
    ]
    for thread in threads:
        thread.start()
    end.recv()
    over.set()
    for thread in threads:
        thread.join()
    end.send(seen)


def memory(server: RunningServer, name: str) -> float:
    """MiB of the server: VmRSS now, or VmHWM since the peak was forgotten."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0]) / 1024


def measured(attack: Attack, server: RunningServer, seconds: float, *, elsewhere: bool) -> str:
    """Attack a server for so many seconds at least; the row of the table."""
    Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")  # Forget the peak.
    before, until = memory(server, "VmRSS"), time.monotonic() + seconds
    with others(server, attack.settings.get("API_TOKEN")) as seen:
        with lowest_priority() if elsewhere else nullcontext():
            attack.run(server, seconds)
        time.sleep(max(0.0, until - time.monotonic()))
    health, slowest = (1000 * max(took, default=0.0) for took in (seen.healths, seen.embeddings))
    normal = ", ".join(f"{count} x {status}" for status, count in sorted(seen.statuses.items()))
    rise = memory(server, "VmHWM") - before
    allowed = sum(20 * size / MIB + 50 for size in attack.bodies)
    figures = (f"{each:.0f}" for each in (health, slowest, before, rise))
    after = f"{memory(server, 'VmRSS'):.0f}"
    cells = (attack.name, *figures, f"{allowed:.0f}" if allowed else "-", after, normal)
    return f"| {' | '.join(cells)} |"


@contextmanager
def lowest_priority() -> Iterator[None]:
    """This thread, and those that it starts, run where nothing else wants to; needs root."""
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, 0)


def main() -> None:
    """Run every attack."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    help_ = "seconds of each lasting attack (%(default)g)"
    add("--seconds", type=float, default=10, help=help_)
    add("--tree", type=Path, default=REPOSITORY, help="the checkout to attack")
    add("--only", default="", help="run the attacks with this in their name")
    add("--model", type=Path, help="EMBEDDING_MODEL, if not a tiny one")
    help_ = "attack at the lowest priority, as from a machine that shares no core with the server"
    add("--elsewhere", action="store_true", help=help_)
    options = parser.parse_args()
    print(
        "| attack | longest /health, ms | longest embedding, ms | memory before, MiB | rise "
        "| allowed | after | answers to the neighbour |\n|---|---:|---:|---:|---:|---:|---:|---|"
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for attack in attacks(folder, options.model):
            if options.only not in attack.name:
                continue
            path = str(options.tree.resolve())
            with run_server(folder, PYTHONPATH=path, **attack.settings) as server:
                server.wait_until_healthy()
                row = measured(attack, server, options.seconds, elsewhere=options.elsewhere)
                print(row, flush=True)


if __name__ == "__main__":
    main()
