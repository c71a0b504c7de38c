"""The longest pauses of the event loop with 200 requests of 1,024 texts waiting, and their causes.

    python -m benchmarks.loop_pause --requests 200 --texts 1024

The service runs in a process of its own whose loop times every callback: by the clock, and by the
processor time of the loop's own thread, which other programs on the machine do not change. A timer
looks where a callback is that takes long. Requests come from another process; some more are refused
while the queue is full (their answers tell how long to wait), and a few leave.
"""

import argparse
import asyncio
import asyncio.events
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import TypedDict

import httpx2

from app.main import create_app
from app.server.process import run as run_service
from benchmarks.checkpoints import SHAPES, save_bge_m3
from benchmarks.workload import Lengths, draw_texts
from tests.support.server import RunningServer, run_server

LIMIT = 0.005
_REPORT = "LOOP_PAUSE_REPORT"
_LOOK_EVERY = 0.002
_TOKENS = Lengths(4, 16)
_MOST_FRAMES = 5


class Pause(TypedDict):
    """A callback over the limit: its seconds by both clocks, and where it mostly was."""

    seconds: float
    cpu: float
    where: str


@dataclass(slots=True)
class Watch:
    """Times what the loop runs, and notes the stack of what takes long."""

    pauses: list[Pause] = field(default_factory=list)
    callbacks: int = 0
    began: float = 0.0
    seen: Counter[tuple[CodeType, ...]] = field(default_factory=Counter)

    def install(self) -> None:
        """From now on every callback of the main thread's loop is timed."""
        plain = asyncio.events.Handle._run  # noqa: SLF001 - there is no other place that sees all

        def timed(handle: asyncio.events.Handle) -> None:
            self.seen.clear()
            began, cpu = time.perf_counter(), time.thread_time()
            self.began = began
            plain(handle)
            self.note(handle, time.perf_counter() - began, time.thread_time() - cpu)
            self.began = 0.0

        asyncio.events.Handle._run = timed  # type: ignore[assignment, method-assign]  # noqa: SLF001
        signal.signal(signal.SIGALRM, self.look)
        signal.setitimer(signal.ITIMER_REAL, _LOOK_EVERY, _LOOK_EVERY)

    def look(self, _number: int, frame: FrameType | None) -> None:
        """Where the loop is, if it has been in one callback for a while; the loop waits for it."""
        if self.began and time.perf_counter() - self.began > LIMIT / 2:
            stack: list[CodeType] = []
            while frame is not None and len(stack) < _MOST_FRAMES:
                stack.append(frame.f_code)
                frame = frame.f_back
            self.seen[tuple(stack)] += 1

    def note(self, handle: asyncio.events.Handle, seconds: float, cpu: float) -> None:
        """Keep it where it was long."""
        self.callbacks += 1
        if seconds > LIMIT:
            stacks = [_names(stack) for stack, _ in self.seen.most_common(1)]
            where = (stacks or [repr(handle)[:200]])[0]
            self.pauses.append(Pause(seconds=seconds, cpu=cpu, where=where))

    def write(self, path: Path) -> None:
        """Leave what was found for the other process, the file complete from its first moment."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        whole = path.with_suffix(".part")
        whole.write_text(json.dumps({"callbacks": self.callbacks, "pauses": self.pauses}))
        whole.replace(path)


def _names(stack: Iterable[CodeType]) -> str:
    """The innermost functions by module and name."""
    return " < ".join(f"{Path(code.co_filename).stem}.{code.co_name}" for code in stack)


def serve() -> None:
    """The service with its loop watched; SIGUSR1 begins, SIGUSR2 writes the report."""
    # uvloop runs the same callbacks, where nothing can time them.
    sys.modules["uvloop"] = None  # type: ignore[assignment]
    watch, report = Watch(), Path(os.environ[_REPORT])
    signal.signal(signal.SIGUSR1, lambda *_: watch.install())
    signal.signal(signal.SIGUSR2, lambda *_: watch.write(report))
    run_service(create_app)


async def load(server: RunningServer, options: argparse.Namespace) -> Counter[int]:
    """Fill the queue, and keep asking for some seconds; whoever still waits then leaves."""
    statuses: Counter[int] = Counter()
    bodies = [
        {"sentences": draw_texts(_TOKENS, options.texts, seed), "return_colbert": False}
        for seed in range(8)
    ]

    async def send(client: httpx2.AsyncClient, number: int) -> None:
        response = await client.post("/embeddings/", json=bodies[number % len(bodies)])
        statuses[response.status_code] += 1

    async with server.async_client(options.requests * 2) as client:
        tasks = {asyncio.create_task(send(client, number)) for number in range(options.requests)}
        await asyncio.to_thread(server.wait_for_metric, "embedding_queue_size", options.requests)
        until = time.monotonic() + options.seconds
        while time.monotonic() < until:
            await asyncio.sleep(0.25)
            tasks.add(asyncio.create_task(send(client, len(tasks))))
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return statuses


def report(pauses: list[Pause], callbacks: int) -> bool:
    """A line for each place; whether no callback computed for longer than the limit."""
    places: dict[str, list[Pause]] = defaultdict(list)
    for pause in pauses:
        places[pause["where"]].append(pause)
    longest = max((pause["cpu"] for pause in pauses), default=0.0)
    print(f"{callbacks} callbacks, {len(pauses)} over {LIMIT * 1000:.0f} ms by the clock;")
    print(f"the longest computed for {longest * 1000:.1f} ms")
    print("times  longest, ms  computed, ms  where")
    order = sorted(places.items(), key=lambda item: -max(pause["cpu"] for pause in item[1]))
    for where, found in order:
        seconds, cpu = (max(pause[clock] for pause in found) for clock in ("seconds", "cpu"))
        print(f"{len(found):5}{seconds * 1000:13.1f}{cpu * 1000:14.1f}  {where}")
    return longest <= LIMIT


def warm_up(server: RunningServer) -> None:
    """What is done once, at the first request, is no matter of load."""
    with server.client() as client:
        body = {"sentences": draw_texts(_TOKENS, 4), "return_colbert": False}
        client.post("/embeddings/", json=body).raise_for_status()


def measure(options: argparse.Namespace, scratch: Path) -> bool:
    """Start the watched service, load it and report."""
    found = scratch / "report.json"
    folder = options.folder or save_bge_m3(scratch / "model", SHAPES["two-layer"])
    settings = {"EMBEDDING_MODEL": str(folder.resolve()), _REPORT: str(found)}
    with run_server(scratch, "benchmarks.loop_pause", **settings) as server:
        server.wait_until_healthy()
        warm_up(server)
        server.process.send_signal(signal.SIGUSR1)
        statuses = asyncio.run(load(server, options))
        server.process.send_signal(signal.SIGUSR2)
        while not found.exists():
            time.sleep(0.05)
    print(f"answers: {dict(statuses)}")
    return report(**json.loads(found.read_text()))


def main() -> int:
    """Run it; 1 where the loop computed for longer than the limit at once."""
    if _REPORT in os.environ:
        serve()
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", help="a checkpoint of bge-m3's shape")
    parser.add_argument("--requests", type=int, default=200, help="requests (%(default)s)")
    parser.add_argument("--texts", type=int, default=1024, help="texts of a request (%(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=20, help="seconds of the load (%(default)g)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        return 0 if measure(options, Path(scratch)) else 1


if __name__ == "__main__":
    sys.exit(main())
