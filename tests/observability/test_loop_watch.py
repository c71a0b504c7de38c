"""How long the loop did not turn, what is said of it, and what watching costs."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from smart_embedder.middleware.observe import LogRequests
from smart_embedder.observability import logs, loop_watch
from smart_embedder.observability.loop_watch import LoopWatch
from tests.middleware.exchange import Inner, exchange

LONG_ENOUGH = 0.4


def compute(seconds: float) -> None:
    """Takes so much of the thread's own time, however busy the machine is."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def wait(seconds: float) -> None:
    time.sleep(seconds)


def blame(hold: Callable[[float], None]) -> dict[str, Any]:
    """The warning where the loop is held; on a busy machine the thread that looks may be late."""

    async def run() -> None:
        counted = asyncio.Event()
        watch = LoopWatch(lambda _: counted.set())
        watch.start()
        with watch.in_work():
            counted.clear()
            hold(LONG_ENOUGH)
            await counted.wait()
        await watch.close()
        assert not watch._thread.is_alive()

    for _ in range(20):
        with capture_logs() as lines:
            asyncio.run(run())
        for line in lines:
            if line["event"] == "event_loop_blocked" and line.get("stack"):
                return line
    raise AssertionError(lines)


@pytest.mark.parametrize(("hold", "ran"), [(compute, True), (wait, False)])
def test_code_that_holds_the_loop_is_named_with_the_time_that_it_ran(hold, ran: bool) -> None:
    warning = blame(hold)
    assert warning["log_level"] == "warning"
    assert warning["seconds"] + loop_watch.BUSY_INTERVAL >= warning["thread_ran"]
    assert (warning["thread_ran"] >= 0.25) == ran
    assert warning["stack"].startswith(f"{__name__}:")
    assert f" {hold.__name__}" in warning["stack"].splitlines()[0]


def test_what_other_threads_do_is_seen_but_for_those_that_wait_for_work() -> None:
    running, gate = threading.Event(), threading.Lock()

    def render() -> None:
        running.set()
        with gate:
            pass

    async def run() -> loop_watch._Seen:
        watch = LoopWatch(lambda _: None)
        watch.start()
        with ThreadPoolExecutor(1, thread_name_prefix="idle") as pool:
            pool.submit(wait, 0.0).result()
            seen = watch._look(watch._beat)
        await watch.close()
        return seen

    with gate:
        thread = threading.Thread(target=render, name="renders")
        thread.start()
        running.wait()
        seen = asyncio.run(run())
    thread.join()
    assert " render" in seen.others["renders"][0]
    assert not [name for name in seen.others if name.startswith(("idle", "loop-watch"))]


def test_one_warning_a_minute_tells_how_many_were_left_out() -> None:
    watch = LoopWatch(lambda _: None)
    with capture_logs() as lines:
        for number in range(4):
            if number == 3:
                watch._log._quiet_until.clear()  # The minute is over.
            watch._write(loop_watch._Pause(watch._beat, 1.0, 1.0, 1.0), None)
    assert [line["left_out"] for line in lines] == [0, 2]
    assert loop_watch._SECONDS_BETWEEN_WARNINGS == 60


@pytest.mark.parametrize(
    ("thread_ran", "process_ran", "late", "runnable", "stack", "event", "told"),
    [
        (0.3, 0.3, 0.0, True, ["app:1 f"], "event_loop_blocked", "stack"),
        (0.3, 0.3, 0.7, True, ["app:1 f"], "event_loop_blocked", "stack"),
        (0.0, 0.1, 0.0, False, ["app:1 f"], "event_loop_blocked", "stack"),
        (0.0, 0.1, 0.0, False, [], "process_stalled", None),
        (0.1, 0.9, 0.0, True, ["app:1 f"], "process_stalled", None),
        (0.0, 0.0, 0.7, False, ["app:1 f"], "process_stalled", None),
        (0.0, 0.9, 0.7, False, ["app:1 f"], "event_loop_blocked", "other_threads"),
        (0.0, 0.5, 0.5, False, ["app:1 f"], "event_loop_blocked", "other_threads"),
        (0.25, 0.3, 0.7, False, ["app:1 f"], "event_loop_blocked", "stack"),
        (None, 0.0, 0.0, False, ["app:1 f"], "event_loop_blocked", "stack"),
    ],
)
def test_code_is_blamed_only_where_it_ran_or_waited(
    thread_ran: float | None,
    process_ran: float,
    late: float,
    runnable: bool,
    stack: list[str],
    event: str,
    told: str | None,
) -> None:
    watch = LoopWatch(lambda _: None)
    pause = loop_watch._Pause(watch._beat, 1.0, thread_ran, process_ran)
    with capture_logs() as lines:
        watch._write(pause, loop_watch._Seen(late, runnable, stack, {"render": ["app:2 g"]}))
    (line,) = lines
    assert line["event"] == event
    assert [key for key in ("stack", "other_threads") if key in line] == [told] * (told is not None)


@pytest.mark.parametrize(("log_format", "separator"), [("text", "\n"), ("json", "\\n")])
def test_the_stack_can_be_read_in_either_format_of_the_log(log_format: str, separator: str) -> None:
    watch = LoopWatch(lambda _: None)
    seen = loop_watch._Seen(0.0, runnable=False, stack=["app:1 f", "app:2 g"], others={})
    with capture_logs() as lines:
        watch._write(loop_watch._Pause(watch._beat, 1.0, 0.0, 0.0), seen)
    line = lines[0]
    for render in logs.renderers(log_format):
        line = render(None, "warning", line)
    assert "event_loop_blocked" in line
    assert f"app:1 f{separator}app:2 g" in line


def test_a_loop_that_waits_for_the_system_is_not_taken_for_code_that_holds_it() -> None:
    """As where the process had no processor, and the watching thread got one first."""
    watch = LoopWatch(lambda _: None)

    async def run() -> None:
        watch.start()
        seen.append(await asyncio.to_thread(look))
        await watch.close()

    def look() -> loop_watch._Seen:
        until = time.monotonic() + 10
        while (at := watch._look(watch._beat)).stack and time.monotonic() < until:
            pass
        return at

    seen: list[loop_watch._Seen] = []
    asyncio.run(run())
    assert seen[0].stack == []


class Script:
    """A watch whose clock, loop and thread do what a test says: each wait is one of its steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.ran = 100.0, 0.0
        self.counted, self.waited, self.woken = list[float](), list[float | None](), 0
        self.delays, self.steps = list[float](), list[Callable[[], None]]()
        monkeypatch.setattr(
            loop_watch,
            "time",
            SimpleNamespace(
                monotonic=lambda: self.now,
                thread_time=lambda: self.ran,
                process_time=lambda: 2 * self.ran,
            ),
        )
        self.watch = LoopWatch(self.counted.append)
        self.watch._wake = self  # type: ignore[assignment]
        self.watch._loop = self  # type: ignore[assignment]
        self.watch._watched = threading.current_thread()
        self.watch._schedule(self.now)

    # The loop's and the event's parts that the watch uses.

    def call_later(self, seconds: float, _call: Callable[[], None]) -> "Script":
        self.delays.append(seconds)
        return self

    def cancel(self) -> None:
        """As a timer."""

    def wait(self, seconds: float | None) -> None:
        self.waited.append(None if seconds is None else round(seconds, 3))
        self.steps.pop(0)() if self.steps else self.end()

    def clear(self) -> None:
        """As an event."""

    def set(self) -> None:
        self.woken += 1

    def end(self) -> None:
        self.watch._closed = True

    # The steps.

    def stuck(self, until: float, ran: float = 0.0) -> Callable[[], None]:
        """The loop does not turn until this moment, and its thread runs so long."""

        def step() -> None:
            self.now, self.ran = until, self.ran + ran

        return step

    def turns(self, at: float, ran: float = 0.0) -> Callable[[], None]:
        def step() -> None:
            self.stuck(at, ran)()
            self.watch._turn()

        return step

    def run(self, *steps: Callable[[], None]) -> list[dict[str, Any]]:
        self.steps = list(steps)
        with capture_logs() as lines:
            self.watch._run()
        return lines


def test_the_thread_looks_when_a_beat_is_late_and_writes_when_the_loop_turns(monkeypatch) -> None:
    script = Script(monkeypatch)  # The beat is due at 101.
    (line,) = script.run(script.stuck(101.3, 0.2), script.turns(103.12345, 1.23456))
    # Until it is a quarter of a second late, then for five seconds; then until the next is late.
    assert script.waited == [1.25, 4.7, 1.25]
    assert (line["event"], line["seconds"]) == ("event_loop_blocked", 2.123)
    assert (line["thread_ran"], line["process_ran"]) == (1.435, 2.869)
    assert script.counted == [pytest.approx(2.12345)]


@pytest.mark.parametrize(
    ("stuck", "turns", "waited", "told", "counted"),
    [
        pytest.param(
            [101.3, 106.0, 200.0], [201.0], [1.25, 4.7, None, None, 1.25],
            [("event_loop_blocked", 5.0)], [100.0], id="it does not turn, and is told of once",
        ),
        pytest.param(
            [150.0], [150.5], [1.25, 1.0, 1.25],
            [("process_stalled", 49.5)], [49.5], id="a stopped process has a second to turn again",
        ),
        pytest.param(
            [], [101.0, 102.2], [1.25, 1.25, 1.25],
            [], [pytest.approx(0.2)], id="a beat in time is not looked at",
        ),
    ],
)  # fmt: skip
def test_a_loop_that_stays_away_is_told_of_after_five_seconds(
    stuck, turns, waited, told, counted, monkeypatch
) -> None:
    script = Script(monkeypatch)
    lines = script.run(*map(script.stuck, stuck), *map(script.turns, turns))
    assert script.waited == waited
    assert [(each["event"], each["seconds"]) for each in lines] == told
    assert script.counted == counted
    assert script.watch._pause is None


@pytest.mark.parametrize(
    ("late", "counts", "warns"),
    [(0.0078125, 0, 0), (0.0156, 1, 0), (0.2421875, 1, 0), (0.25, 1, 1)],
)
def test_a_pause_counts_from_ten_milliseconds_and_is_told_from_a_quarter_of_a_second(
    late, counts, warns, monkeypatch
) -> None:
    script = Script(monkeypatch)
    script.turns(101.0 + late)()
    assert (len(script.counted), script.woken) == (counts, warns)


def test_a_request_brings_the_next_beat_forward_and_no_second_one_or_overdue_one_does(
    monkeypatch,
) -> None:
    script = Script(monkeypatch)
    with script.watch.in_work():
        assert (script.delays, script.woken) == ([1.0, 0.01], 1)
        with script.watch.in_work():
            assert (script.delays, script.woken) == ([1.0, 0.01], 1)
    script.turns(script.now + 0.5)()
    assert script.delays[-1] == 0.01, "for a second after it"
    script.turns(script.now + 0.5)()
    assert script.delays[-1] == 1.0
    woken = script.woken
    script.now += 1.5
    with script.watch.in_work():
        assert (script.delays[-1], script.woken) == (1.0, woken), "its pause is to be counted"
    script.watch._thread.start()
    asyncio.run(script.watch.close())
    assert script.woken == woken + 1


def test_a_stack_has_sixteen_calls_at_most_and_tells_whether_its_thread_wants_to_run() -> None:
    watch, seen = LoopWatch(lambda _: None), list[loop_watch._Seen]()
    watch._watched = threading.current_thread()

    def look_until(runnable: bool) -> None:
        until = time.monotonic() + 10
        while (at := watch._look(watch._beat)).runnable != runnable and time.monotonic() < until:
            pass
        seen.append(at)

    def deeper(levels: int, runnable: bool) -> None:
        if levels:
            deeper(levels - 1, runnable)
            return
        looks = threading.Thread(target=look_until, args=(runnable,))
        looks.start()
        while runnable and len(seen) < 2:
            pass
        looks.join()

    for runnable in (False, Path("/proc/self/task").exists()):
        deeper(20, runnable)
        assert seen[-1].runnable == runnable
        assert len(seen[-1].stack) == 16


async def test_a_loop_is_watched_closely_while_a_request_is_in_work(monkeypatch) -> None:
    script, seen = Script(monkeypatch), []

    async def app(scope, receive, send) -> None:
        seen.append(list(script.delays))
        await Inner()(scope, receive, send)

    await exchange(LogRequests(app, script.watch))
    assert seen == [[1.0, 0.01]]


def test_a_watch_that_never_began_ends() -> None:
    async def run() -> None:
        watch = LoopWatch(lambda _: None)
        with watch.in_work():
            pass
        await watch.close()

    asyncio.run(run())


# Garbage with local data of a thread, which is collected while frames of many threads are made.
_COLLECTED_IN_BETWEEN = """
import gc, os, threading
from smart_embedder.observability.loop_watch import frames_of_threads

class Cycle:
    def __init__(self):
        self.local, self.itself = threading.local(), self
        self.local.value = 1

never = threading.Event()
for _ in range(50):
    threading.Thread(target=never.wait, daemon=True).start()
gc.disable()
made = [Cycle() for _ in range(100)]
made.clear()
gc.enable()
gc.set_threshold(gc.get_count()[0] + 20, 1, 1)
assert len(frames_of_threads()) == 51 and gc.isenabled()
os._exit(0)
"""


def test_looking_at_threads_never_stops_the_process_at_a_collection() -> None:
    subprocess.run([sys.executable, "-c", _COLLECTED_IN_BETWEEN], check=True, timeout=60)
