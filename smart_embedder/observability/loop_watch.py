"""Watches whether the event loop turns: how long it did not, and what held it.

A callback of the loop, the beat, is due every 10 ms while a request is in work and for a second
after, else once a second, so that an idle service hardly wakes a machine. What it is late is how
long the loop did not turn (up to one interval less). A thread sleeps until a beat is a quarter of a
second late, and takes the stack of the loop's thread then.
"""

import asyncio
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from smart_embedder.observability.logs import SampledLog

BUSY_INTERVAL = 0.01
IDLE_INTERVAL = 1.0
_BUSY_AFTER = 1.0
# What is shorter is not counted: timers of the system are late by up to a millisecond.
SHORTEST = 0.01
_WARN_AFTER = 0.25
# A loop that does not turn at all is written of, too.
_WRITE_AFTER = 5.0
# What a process that was stopped gets to turn again, before it is said that it does not.
_TO_GO_ON = 1.0
_SECONDS_BETWEEN_WARNINGS = 60.0
_MOST_FRAMES = 16
# Where a thread stands that waits for work.
_WAITING = {"queue.py", "selectors.py", "thread.py", "threading.py"}
# Where the loop's thread stands that calls nothing: it waits for the system, or for its turn.
_OF_THE_LOOP = {"asyncio.base_events", "asyncio.runners", "selectors"}


@dataclass(frozen=True, slots=True)
class _Beat:
    """When the loop was due to turn, and the processor times when that was decided, in seconds."""

    due: float
    thread_time: float
    process_time: float


@dataclass(frozen=True, slots=True)
class _Pause:
    """How long a beat was late, and how long the loop's thread and the process ran meanwhile.

    The thread's time is None while that is not over.
    """

    beat: _Beat
    seconds: float
    thread_ran: float | None
    process_ran: float


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the watching thread saw: how late it was itself, and the stacks, innermost first.

    `stack` is the loop's, empty where the loop called nothing.
    """

    late: float
    runnable: bool
    stack: list[str]
    others: dict[str, list[str]]


class LoopWatch:
    """Watches one event loop from `start` to `close`; both are called on it.

    `observe` gets the seconds of each pause of 10 ms or more, whatever its reason.
    """

    def __init__(self, observe: Callable[[float], None]) -> None:
        self._observe = observe
        self._log = SampledLog(_SECONDS_BETWEEN_WARNINGS)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._in_work = 0
        self._busy_until = 0.0
        self._beat = _Beat(0.0, 0.0, 0.0)
        # The last pause that is long enough for a warning; the thread takes it away.
        self._pause: _Pause | None = None
        self._closed = False
        self._wake = threading.Event()
        self._watched: threading.Thread | None = None
        self._thread = threading.Thread(target=self._run, name="loop-watch", daemon=True)

    def start(self) -> None:
        """Watch the running loop."""
        self._loop = asyncio.get_running_loop()
        self._watched = threading.current_thread()
        self._schedule(time.monotonic())
        self._thread.start()

    async def close(self) -> None:
        """End the beats and the thread."""
        self._closed = True
        self._wake.set()
        if self._timer is not None:
            self._timer.cancel()
            # Not for ever: it may be writing to a log that nobody reads.
            await asyncio.to_thread(self._thread.join, _WRITE_AFTER)

    @contextmanager
    def in_work(self) -> Iterator[None]:
        """Watch closely within the block, and for a second after it."""
        self._in_work += 1
        now = time.monotonic()
        # A beat that is overdue stays, so that its pause is counted.
        if self._timer is not None and not self._closed and now + BUSY_INTERVAL < self._beat.due:
            self._timer.cancel()
            self._schedule(now)
            self._wake.set()
        try:
            yield
        finally:
            self._in_work -= 1
            self._busy_until = time.monotonic() + _BUSY_AFTER

    def _schedule(self, now: float) -> None:
        assert self._loop is not None  # noqa: S101 - it has been started
        is_busy = self._in_work or now < self._busy_until
        interval = BUSY_INTERVAL if is_busy else IDLE_INTERVAL
        self._beat = _Beat(now + interval, time.thread_time(), time.process_time())
        self._timer = self._loop.call_later(interval, self._turn)

    def _turn(self) -> None:
        """The loop turns: note what it is late, and when it is due next."""
        now, beat = time.monotonic(), self._beat
        late = now - beat.due
        if late >= SHORTEST:
            self._observe(late)
        if late >= _WARN_AFTER:
            thread_ran = time.thread_time() - beat.thread_time
            self._pause = _Pause(beat, late, thread_ran, time.process_time() - beat.process_time)
            self._wake.set()
        self._schedule(now)

    def _run(self) -> None:
        """The thread: sleep until a beat is late, look, and write when the loop turns again."""
        written: _Beat | None = None
        while not self._closed:
            beat = self._beat
            is_written = written is beat
            self._sleep(None if is_written else beat.due + _WARN_AFTER)
            seen = None
            if not is_written and self._is_late(beat, _WARN_AFTER):
                seen = self._look(beat)
                self._sleep(max(beat.due + _WRITE_AFTER, time.monotonic() + _TO_GO_ON))
            pause, self._pause = self._pause, None
            if pause is None and seen is not None and self._is_late(beat, _WRITE_AFTER):
                ran = time.process_time() - beat.process_time
                pause = _Pause(beat, time.monotonic() - beat.due, None, ran)
            if pause is not None and pause.beat is not written:
                written = pause.beat
                self._write(pause, seen if pause.beat is beat else None)

    def _sleep(self, until: float | None) -> None:
        self._wake.wait(None if until is None else max(0.0, until - time.monotonic()))
        self._wake.clear()

    def _is_late(self, beat: _Beat, seconds: float) -> bool:
        return self._beat is beat and time.monotonic() >= beat.due + seconds

    def _look(self, beat: _Beat) -> _Seen:
        late = time.monotonic() - beat.due - _WARN_AFTER
        watched = self._watched
        assert watched is not None  # noqa: S101 - it has been started
        frames = frames_of_threads()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        others = {
            names.get(ident, str(ident)): _stack_of(frame)
            for ident, frame in frames.items()
            if ident not in {watched.ident, self._thread.ident}
            and Path(frame.f_code.co_filename).name not in _WAITING
        }
        own, stack = frames.get(watched.ident or 0), list[str]()
        if (
            own is not None
            and own.f_code is not self._turn.__code__
            and own.f_globals.get("__name__") not in _OF_THE_LOOP
        ):
            stack = _stack_of(own)
        return _Seen(late, _is_runnable(watched.native_id), stack, others)

    def _write(self, pause: _Pause, seen: _Seen | None) -> None:
        """A warning, which blames code only where that ran or waited by itself."""
        facts: dict[str, object] = {
            "seconds": round(pause.seconds, 3),
            "thread_ran": None if pause.thread_ran is None else round(pause.thread_ran, 3),
            "process_ran": round(pause.process_ran, 3),
        }
        half = pause.seconds / 2
        event = "event_loop_blocked"
        # As text: that is what the log's library takes for a stack.
        stack = "\n".join(seen.stack) if seen else ""
        if pause.thread_ran is None or pause.thread_ran >= _WARN_AFTER:
            # On a machine of its own it would have held the loop as well.
            facts["stack"] = stack
        elif seen is not None and seen.late < half:
            # This thread ran, and the loop's did not: it waited, or another got the processor.
            if seen.runnable or not stack:
                event = "process_stalled"
            else:
                facts["stack"] = stack
        elif pause.process_ran < half:
            event = "process_stalled"
        else:
            # Neither ran, and something did: another thread held Python's lock.
            facts["other_threads"] = seen.others if seen else {}
        self._log.warning(event, **facts)


def frames_of_threads() -> dict[int, FrameType]:
    """The innermost frame of each thread.

    While CPython makes them it holds a lock that the end of a thread's local data takes, too: a
    collection in between would wait for that for ever, and every thread with it (in 3.11).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()  # noqa: SLF001 - there is no other way to see a thread
    finally:
        if collects:
            gc.enable()


def _stack_of(frame: FrameType | None) -> list[str]:
    """The innermost calls first, each as `module:line function`; nothing that they hold."""
    stack: list[str] = []
    while frame is not None and len(stack) < _MOST_FRAMES:
        module = frame.f_globals.get("__name__", "?")
        stack.append(f"{module}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return stack


def _is_runnable(native_id: int | None) -> bool:
    """Whether the system says that a thread wants a processor; False where it does not tell."""
    try:
        status = Path(f"/proc/self/task/{native_id}/stat").read_text("utf-8")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] == "R"
