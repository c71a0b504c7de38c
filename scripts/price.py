"""What a byte costs: requests by grammar against a real server, each growing by doubling.

    python -m scripts.price --seed 1 --report price.md
    python -m scripts.price --tree ../another-checkout --only "Accept:"

For each shape of a request (of `scripts.price_grammar`) it measures the processor time for each
byte and how it grows, the longest time that the event loop did not turn, the peak memory and the
bytes of the answer. It fails where a doubling costs more than 2.5 times, where the loop is held for
more than 50 ms, where memory rises above 20 times the body and 50 MiB, and where work goes on for
long after its client has left.

What is measured is the server's processor time, so that other programs count little, and a finding
counts if it shows again each time that it is repeated. `--minutes` are of the processor, of server
and client together, which on two idle cores is about the time that the run takes; what is left out
then is counted. Shapes come in an order in which a part has something of everything. A shape ends
at its first finding, and where a request takes half a second; of one that is refused three times
alike and cheaply only the largest size is asked for besides. With even seeds late interaction is
the reranker, with odd ones a classifier, which serves /predict.
"""

import argparse
import math
import mmap
import os
import re
import selectors
import socket
import struct
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from itertools import pairwise
from pathlib import Path

import httptools

from scripts.price_grammar import KIB, Asked, Shape, draw
from scripts.price_probe.sitecustomize import SIZE, STACK_AT, THREADS, THREADS_AT, TICKS_AT, TRIM_AT
from tests.support.checkpoints import save_m3, save_reranker
from tests.support.memory import forget_peak, status_bytes
from tests.support.server import REPOSITORY, RunningServer, run_server

MIB = KIB * KIB
FIRST = 16 * KIB
MOST_GROWTH = 2.5
MOST_HELD = 0.05
BYTES_PER_BYTE, BYTES_BESIDE = 20, 50 * MIB
# Processor seconds of a request: up to LITTLE it is cheap, from LEAST_JUDGED on its growth is
# judged, above MOST_JUDGED nothing larger is asked for, and at MOST_SPENT it is given up, to which
# MOST_OF_FORWARDS are added.
LITTLE, LEAST_JUDGED, MOST_JUDGED, MOST_SPENT, MOST_OF_FORWARDS = 0.03, 0.1, 0.5, 3.0, 9.0
# What a client that has left may still cost.
MOST_LEFT_OVER = 1.0
# A finding shows again each time.
REPEATS = 2
# Seconds without an answer, while the server works less than this, which is more than the probe.
PATIENCE, WORKING = 5.0, 0.1
PROBE = Path(__file__).parent / "price_probe"


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one request: seconds of the processor without forwards, of the loop held, and bytes.

    `asked` is the size that its shape was asked for, `size` that of its body, unpacked.
    """

    asked: int
    size: int
    sent: int
    status: int
    seconds: float
    held: float
    place: str
    rise: int
    answer: int
    left_over: float = 0.0

    @property
    def allowed(self) -> int:
        """By how many bytes memory may rise."""
        return BYTES_PER_BYTE * self.size + BYTES_BESIDE


@dataclass(slots=True)
class Result:
    """The costs of a shape, from the smallest on, and what is wrong with them."""

    shape: Shape
    costs: list[Cost] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_refused(self) -> bool:
        """Whether the last three were refused alike without much work, as larger ones will be."""
        last = self.costs[-3:]
        alike = len(last) == 3 and len({cost.status for cost in last}) == 1
        return alike and last[-1].status >= 400 and last[-1].seconds < LITTLE


class Measured:
    """A server whose process has the probe."""

    def __init__(self, server: RunningServer, seen: mmap.mmap) -> None:
        self.server = server
        self._seen = seen
        self._pid = server.process.pid
        host, port = server.url.removeprefix("http://").split(":")
        self._address = host, int(port)

    def seconds(self) -> float:
        """Seconds of the processor that the process has taken: its clock is told by its id."""
        return time.clock_gettime((~self._pid << 3) | 2)

    def _seconds_of_forwards(self) -> float:
        """Those of the devices' threads, which a request pays for elsewhere."""
        threads = [each for each in struct.unpack_from(THREADS, self._seen, THREADS_AT) if each]
        paths = [Path(f"/proc/{self._pid}/task/{each}/schedstat") for each in threads]
        return sum(int(path.read_text().split()[0]) for path in paths if path.exists()) / 1e9

    def trim(self) -> None:
        """Let it give free memory back, so that its next use is seen."""
        self._seen[TRIM_AT] = 1
        until = time.monotonic() + PATIENCE
        while self._seen[TRIM_AT] and time.monotonic() < until:
            time.sleep(0.002)

    def measure(self, asked: Asked, size: int) -> Cost:
        """Send a request and read its answer."""
        self._seen[:THREADS_AT] = bytes(THREADS_AT)
        forget_peak(self._pid)
        before, began = status_bytes(self._pid, "VmRSS"), self.seconds()
        forwards = self._seconds_of_forwards()
        status, answer, ended = self._exchange(asked.content, began)
        seconds = self.seconds() - began - self._seconds_of_forwards() + forwards
        left_over = 0.0 if ended else self._wait_for_idle()
        # Until the loop has turned, and what it was held for is known.
        tick, until = self._seen[TICKS_AT], time.monotonic() + PATIENCE
        while (self._seen[TICKS_AT] - tick) % 256 < 2 and time.monotonic() < until:
            time.sleep(0.001)
        turn, waited = struct.unpack_from("dd", self._seen)
        place = self._seen[STACK_AT:THREADS_AT].split(b"\0")[0].decode(errors="replace")
        return Cost(
            asked=size,
            size=asked.size,
            sent=len(asked.content),
            status=status,
            seconds=seconds,
            held=max(turn, waited),
            place=place if turn >= waited else f"another thread while {place}",
            rise=status_bytes(self._pid, "VmHWM") - before,
            answer=answer,
            left_over=left_over,
        )

    def _exchange(self, content: bytes, began: float) -> tuple[int, int, bool]:
        """Status, bytes of the answer, and whether it ended before it cost too much."""
        left, answer, forwards = memoryview(content), Answer(), self._seconds_of_forwards()
        with socket.create_connection(self._address) as raw, selectors.DefaultSelector() as ready:
            raw.setblocking(False)
            ready.register(raw, selectors.EVENT_READ | selectors.EVENT_WRITE)
            working, since = began, time.monotonic()
            while not answer.is_whole:
                for _, events in ready.select(0.1):
                    since = time.monotonic()
                    if events & selectors.EVENT_WRITE and left:
                        with suppress(BlockingIOError, ConnectionError):
                            left = left[raw.send(left[: 4 * MIB]) :]
                    if not left:
                        ready.modify(raw, selectors.EVENT_READ)
                    if events & selectors.EVENT_READ:
                        answer.take(raw)
                now = self.seconds()
                of_forwards = self._seconds_of_forwards() - forwards
                if now - began > MOST_SPENT + min(of_forwards, MOST_OF_FORWARDS):
                    return answer.status, answer.size, False
                if now - working > WORKING:
                    working, since = now, time.monotonic()
                if time.monotonic() - since > PATIENCE:
                    break
        return answer.status, answer.size, True

    def _wait_for_idle(self) -> float:
        """Seconds of the processor that go on for a client that has left."""
        began = last = self.seconds()
        while last - began < MOST_LEFT_OVER:
            time.sleep(0.3)
            now = self.seconds()
            if now - last < 0.03:
                break
            last = now
        return last - began


class Answer:
    """Counts the bytes of an answer; its status is 0 where there was none."""

    def __init__(self) -> None:
        self.size = self.status = 0
        self.is_whole = False
        self._parser = httptools.HttpResponseParser(self)

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self.status = self._parser.get_status_code()

    def on_message_complete(self) -> None:
        """Called by the parser, also for what only announces an answer."""
        self.is_whole = self.status >= HTTPStatus.OK

    def take(self, raw: socket.socket) -> None:
        """Read what is there."""
        try:
            part = raw.recv(MIB)
        except ConnectionError:
            part = b""
        self.size += len(part)
        if part:
            self._parser.feed_data(part)
        else:
            self.is_whole = True


class Judge:
    """Measures shapes and says what is wrong with them."""

    def __init__(self, measured: Measured) -> None:
        self._measured = measured
        head = b"GET /health/live HTTP/1.1\r\nHost: a\r\nConnection: close\r\nCookie: %b\r\n\r\n"
        harmless = Asked(head % (b"a" * FIRST), 0)
        # What a request costs whatever is in it.
        self._base = min(measured.measure(harmless, FIRST).seconds for _ in range(3))

    def judge(self, shape: Shape) -> Result:
        """The costs of a shape as far as it can grow, or until something is wrong."""
        result, began = Result(shape), self._measured.seconds() + time.process_time()
        if shape.limit > MIB:
            self._measured.trim()
        for size in sizes(shape):
            if result.is_refused and size < shape.limit:
                continue
            result.costs.append(self._measured.measure(shape.make(size), size))
            result.findings += self._findings(result)
            if result.findings or result.costs[-1].seconds > MOST_JUDGED:
                break
        result.seconds = self._measured.seconds() + time.process_time() - began
        return result

    def _findings(self, result: Result) -> list[str]:
        """What is wrong with the last cost, and is so again each time."""
        found = self._suspicions(result.costs)
        for _ in range(REPEATS):
            if found:
                last = [self._repeated(result.shape, cost) for cost in result.costs[-3:]]
                result.costs[-3:] = last
                again = self._suspicions(result.costs)
                found = {name: why for name, why in again.items() if name in found}
        return list(found.values())

    def _repeated(self, shape: Shape, before: Cost) -> Cost:
        """The smaller of what it cost before, and now."""
        self._measured.trim()
        now = self._measured.measure(shape.make(before.asked), before.asked)
        held = min((before, now), key=lambda cost: cost.held)
        names = ("seconds", "rise", "left_over")
        least = {name: min(getattr(before, name), getattr(now, name)) for name in names}
        return replace(now, held=held.held, place=held.place, **least)

    def _suspicions(self, costs: list[Cost]) -> dict[str, str]:
        last = costs[-1]
        found: dict[str, str] = {}
        if last.held > MOST_HELD:
            found["held"] = f"the loop is held for {last.held * 1000:.0f} ms by {last.place}"
        if last.rise > last.allowed:
            found["memory"] = (
                f"memory rises by {last.rise / MIB:.0f} MiB of {last.allowed / MIB:.0f}"
            )
        if last.left_over >= MOST_LEFT_OVER:
            found["goes on"] = f"work goes on for {last.left_over:.1f} s after its client has left"
        if growth := self._growth(costs):
            found["growth"] = f"a doubling costs {growth:.1f} times"
        return found

    def _growth(self, costs: list[Cost]) -> float:
        """How many times the last cost is the one before; 0 where that is not above linear.

        The doubling before is looked at, too: a cost that only jumps, as where another way is taken
        from some size on, is no growth. Where an answer has more than doubled, that counts.
        """
        if len(costs) < 2 or costs[-1].seconds - self._base < LEAST_JUDGED:
            return 0.0
        last = costs[-3:]
        own = [max(cost.seconds - self._base, LITTLE / 3) for cost in last]
        growth = []
        for before, cost in zip(own[:-1], last[:-1], strict=True):
            # In what was asked for, or in the bytes received and sent.
            exchanged = (last[-1].size + last[-1].answer) / (cost.size + cost.answer)
            times_larger = max(last[-1].asked / cost.asked, exchanged)
            growth.append((own[-1] / before) ** (1 / math.log2(times_larger)))
        return growth[-1] if min(growth) > MOST_GROWTH else 0.0


def sizes(shape: Shape) -> list[int]:
    """Doubling, up to the shape's limit; heads begin below what is refused for its size alone."""
    first = FIRST // 8 if shape.family in {"head", "url"} else FIRST
    doubled = [first << times for times in range(20) if first << times < shape.limit]
    return [*doubled, shape.limit]


@contextmanager
def started(folder: Path, tree: Path, largest: int, reranker: str) -> Iterator[Measured]:
    """A server of a checkout, with tiny random models, limits by default and no rate limit."""
    seen = folder / "probe"
    seen.write_bytes(bytes(SIZE))
    settings = {
        "EMBEDDING_MODEL": str(folder / "m3"),
        "RERANKER_MODEL": reranker,
        "MODELS": "models.yaml",
        "PRICE_PROBE": str(seen),
        "PYTHONPATH": f"{PROBE}:{tree}",
        # The model's work is not what is measured.
        "BGE_EMBED_MAX_LENGTH": "512",
        "BGE_RERANK_MAX_LENGTH": "512",
        "MAX_BATCH_TOKENS": "2048",
        "MAX_BODY_BYTES": str(largest),
        # Each with one thread, so that what forwards take can be told apart.
        "DEVICE": "cpu:0,cpu:1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    with (
        seen.open("r+b") as file,
        mmap.mmap(file.fileno(), SIZE) as shared,
        run_server(folder, fresh=True, **settings) as server,
    ):
        with server.client() as client:  # The further model is loaded when it is asked for.
            until = time.monotonic() + 6 * PATIENCE
            while client.post("/models/other/tokenize", json={"inputs": "a"}).status_code == 503:
                if time.monotonic() > until:
                    break
                time.sleep(0.2)
        yield Measured(server, shared)


def run(tree: Path, seed: int, minutes: float, only: str, largest: int) -> Iterator[Result | int]:
    """The result of each shape; at the end, how many were left out."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        save_m3(folder / "m3", layers=1)
        save_reranker(folder / "labels")
        (folder / "other").symlink_to(folder / "m3")
        (folder / "models.yaml").write_text(f"- name: {folder / 'other'}\n")
        # One serves no /predict, and the other no late interaction.
        reranker = str(folder / "labels") if seed % 2 else "late-interaction"
        spent = -time.process_time()
        shapes: list[Shape] | None = None
        while shapes is None or shapes:
            with started(folder, tree, largest, reranker) as measured:
                if shapes is None:
                    description = measured.server.get("/openapi.json").json()
                    shapes = [
                        each
                        for each in draw(description, seed, ["other"], largest)
                        if re.search(only, f"{each.family}: {each.name}")
                    ]
                judge = Judge(measured)
                while shapes:
                    if spent + time.process_time() + measured.seconds() > 60 * minutes:
                        yield len(shapes)
                        return
                    yield (result := judge.judge(shapes.pop(0)))
                    ended = measured.server.process.poll() is not None
                    if ended or result.costs[-1].left_over >= MOST_LEFT_OVER:
                        break
                spent += measured.seconds()
                measured.server.process.kill()


HEADS = (
    "shape | largest, KiB | us of the processor for each byte | largest growth | loop held, ms "
    "| memory, MiB | of | answer, KiB | status | took, s | findings"
)


def row(result: Result) -> str:
    """One row of the table."""
    last, shape = result.costs[-1], result.shape
    worst = max(result.costs, key=lambda cost: cost.rise / cost.allowed)
    # How many times a doubling costs, where it costs enough to tell.
    growth = [
        after.seconds / before.seconds
        for before, after in pairwise(result.costs)
        if after.asked <= 2 * before.asked and after.seconds > LEAST_JUDGED
    ]
    cells = (
        f"{shape.family}: {shape.name}".replace("|", "\\|"),
        f"{last.sent / KIB:.0f}",
        f"{last.seconds * 1e6 / last.sent:.3f}",
        f"{max(growth, default=0.0):.1f}",
        f"{max(cost.held for cost in result.costs) * 1000:.1f}",
        f"{worst.rise / MIB:.0f}",
        f"{worst.allowed / MIB:.0f}",
        f"{max(cost.answer for cost in result.costs) / KIB:.0f}",
        f"{last.status}",
        f"{result.seconds:.2f}",
        "; ".join(result.findings),
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure, print what is found, and write a report of all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--seed", type=int, default=0, help="the same shapes again (%(default)d)")
    add("--minutes", type=float, default=18, help="of the processor, in all (%(default)g)")
    add("--tree", type=Path, default=REPOSITORY, help="the checkout to measure")
    help_ = "MiB of a body, and MAX_BODY_BYTES (%(default)d)"
    add("--largest", type=int, default=32, help=help_)
    add("--only", default="", help="a regular expression in the name of a shape, such as ^body")
    add("--report", type=Path, help="where a row for each shape is written")
    options = parser.parse_args()
    found, left_out = 0, 0
    judged: Counter[str] = Counter()
    seconds: dict[str, float] = defaultdict(float)
    began = time.monotonic()
    with (options.report or Path(os.devnull)).open("w") as report:
        print(f"| {HEADS} |\n|{'---|' * (HEADS.count('|') + 1)}", file=report)
        given = (options.tree.resolve(), options.seed, options.minutes, options.only)
        for result in run(*given, options.largest * MIB):
            if isinstance(result, int):
                left_out = result
                continue
            judged[result.shape.family] += 1
            seconds[result.shape.family] += result.seconds
            line = row(result)
            print(line, file=report, flush=True)
            if result.findings:
                found += 1
                print(line, flush=True)
    print({family: f"{number} in {seconds[family]:.0f} s" for family, number in judged.items()})
    print(f"{judged.total()} measured in {time.monotonic() - began:.0f} s, {left_out} left out")
    print(f"seed {options.seed}: {found} shapes with findings")
    sys.exit(found > 0)


if __name__ == "__main__":
    main()
