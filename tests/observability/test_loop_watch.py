"""How long the loop did not turn, what is said of it, and what watching costs."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from structlog.testing import capture_logs

from app.observability import loop_watch
from app.observability.loop_watch import LoopWatch

LONG_ENOUGH = 0.4


def compute(seconds: float) -> None:
    """Takes so much of the thread's own time, however busy the machine is."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def wait(seconds: float) -> None:
    time.sleep(seconds)


class Noted(list[float]):
    """Numbers that a loop can wait for."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = asyncio.Event()

    def note(self, number: float) -> None:
        self.append(number)
        self._changed.set()

    async def wait_for_more(self, than: int) -> None:
        while len(self) <= than:
            await self._changed.wait()
            self._changed.clear()


def warnings_of(*held) -> tuple[list[dict[str, object]], list[float]]:
    """What is logged, and what is counted, where the loop is held by one after another."""
    counted = Noted()

    async def run() -> None:
        watch = LoopWatch(counted.note)
        watch.start()
        with watch.in_work():
            for hold in held:
                pauses = len(counted)
                hold()
                await counted.wait_for_more(pauses)
        await watch.close()
        assert not watch._thread.is_alive()

    with capture_logs() as lines:
        asyncio.run(run())
    return lines, counted


def blame(hold, event: str) -> dict[str, object]:
    """The warning; on a busy machine the thread that looks may come too late several times."""
    for _ in range(20):
        lines, _ = warnings_of(hold)
        for line in lines:
            if line["event"] == event and line["stack"]:
                return line
    raise AssertionError(lines)


def test_code_that_computes_on_the_loop_is_named_with_the_time_that_it_ran() -> None:
    warning = blame(lambda: compute(LONG_ENOUGH), "event_loop_blocked")
    assert warning["log_level"] == "warning"
    assert warning["seconds"] + loop_watch.BUSY_INTERVAL >= warning["thread_ran"] >= 0.3
    assert warning["stack"][0].startswith(f"{__name__}:")
    assert " compute" in warning["stack"][0]


def test_code_that_waits_on_the_loop_is_named_though_it_did_not_run() -> None:
    warning = blame(lambda: wait(LONG_ENOUGH), "event_loop_blocked")
    assert warning["thread_ran"] < 0.25
    assert " wait" in warning["stack"][0]


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


def test_each_pause_is_counted_once() -> None:
    _, counted = warnings_of(*[lambda: compute(LONG_ENOUGH)] * 2, lambda: compute(0.05))
    assert len([seconds for seconds in counted if seconds >= LONG_ENOUGH * 0.9]) == 2
    assert len([seconds for seconds in counted if seconds >= 0.03]) >= 3


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
    ("thread_ran", "process_ran", "late", "runnable", "event"),
    [
        (0.3, 0.3, 0.0, True, "event_loop_blocked"),
        (0.3, 0.3, 0.7, True, "event_loop_blocked"),
        (0.0, 0.1, 0.0, False, "event_loop_blocked"),
        (0.1, 0.9, 0.0, True, "process_stalled"),
        (0.0, 0.0, 0.7, False, "process_stalled"),
        (0.0, 0.9, 0.7, False, "event_loop_blocked"),
        (None, 0.0, 0.0, False, "event_loop_blocked"),
    ],
)
def test_code_is_blamed_only_where_it_ran_or_waited(
    thread_ran: float | None, process_ran: float, late: float, runnable: bool, event: str
) -> None:
    watch = LoopWatch(lambda _: None)
    pause = loop_watch._Pause(watch._beat, 1.0, thread_ran, process_ran)
    with capture_logs() as lines:
        watch._write(pause, loop_watch._Seen(late, runnable, ["app:1 f"], {"render": ["app:2 g"]}))
    (line,) = lines
    assert line["event"] == event
    assert ("stack" in line) == (event == "event_loop_blocked")


def test_an_idle_loop_is_looked_at_once_a_second_and_a_busy_one_a_hundred_times() -> None:
    due = Noted()

    async def run(monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        call_later = loop.call_later

        def noted(delay, *rest):
            due.note(delay)
            return call_later(delay, *rest)

        monkeypatch.setattr(loop, "call_later", noted)
        monkeypatch.setattr(loop_watch, "_BUSY_AFTER", 0.0)
        watch = LoopWatch(lambda _: None)
        watch.start()
        with watch.in_work(), watch.in_work():
            await due.wait_for_more(4)
        while due[-1] != loop_watch.IDLE_INTERVAL:
            await due.wait_for_more(len(due))
        await watch.close()
        assert watch._timer.cancelled()

    with pytest.MonkeyPatch.context() as monkeypatch:
        asyncio.run(run(monkeypatch))
    busy = loop_watch.BUSY_INTERVAL
    assert due == [loop_watch.IDLE_INTERVAL, *[busy] * (len(due) - 2), loop_watch.IDLE_INTERVAL]


def test_a_pause_that_began_while_the_loop_was_idle_is_counted() -> None:
    counted = Noted()

    async def run() -> None:
        watch = LoopWatch(counted.note)
        watch.start()
        wait(loop_watch.IDLE_INTERVAL + 0.1)
        with watch.in_work():  # It comes first, and must not hide that the beat is overdue.
            pass
        await counted.wait_for_more(0)
        await watch.close()

    asyncio.run(run())
    assert counted[0] >= 0.09


def test_a_watch_that_never_began_ends() -> None:
    async def run() -> None:
        watch = LoopWatch(lambda _: None)
        with watch.in_work():
            pass
        await watch.close()

    asyncio.run(run())
