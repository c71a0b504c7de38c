"""An event loop with virtual time, and the threads of devices on it.

Time passes only when there is nothing else to do: the clock then moves to the next timer. Calls
that the engine gives to threads run on the loop, at a moment of virtual time, so that a run depends
only on its seed. A step is one callback that the loop runs.
"""

import asyncio
import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from smart_embedder.devices.thread import DeviceThread
from smart_embedder.errors import InferenceError

Result = TypeVar("Result")

# Not 0, which the engine uses for times that are not known yet.
_BEGINNING = 1000.0
_MAX_CANCELLED = 500


@dataclass(frozen=True, slots=True)
class Moments:
    """With `are_common`, rounds seconds to 16ths, so that many events are at the same moment."""

    are_common: bool = False

    def rounded(self, seconds: float) -> float:
        if not self.are_common or math.isinf(seconds):
            return seconds
        return math.ceil(seconds * 16) / 16


class StandstillError(Exception):
    """A task waits, and there is no timer and no callback."""


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop with virtual time.

    `on_quiet` is called before time passes. A call in an executor takes `seconds_of()` seconds, and
    runs at the end of that time.
    """

    def __init__(self, seconds_of: Callable[[], float]) -> None:
        super().__init__()
        self.now = _BEGINNING
        self.steps = 0
        self.on_quiet: Callable[[], None] = lambda: None
        self._seconds_of = seconds_of
        self._ready: deque[asyncio.Handle]
        self._scheduled: list[asyncio.TimerHandle]
        self._stopping: bool

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        """Run callbacks until the loop stops."""
        ready = self._ready
        while not self._stopping:
            if not ready:
                self.on_quiet()
                if not ready:
                    self._pass_time()
            handle = ready.popleft()
            if not handle._cancelled:
                self.steps += 1
                handle._run()

    def _pass_time(self) -> None:
        """Move the clock to the next timer, and make all timers of that moment ready."""
        scheduled, ready = self._scheduled, self._ready
        if len(scheduled) > _MAX_CANCELLED:
            scheduled[:] = [timer for timer in scheduled if not timer._cancelled]
            heapq.heapify(scheduled)
        while scheduled and scheduled[0]._cancelled:
            heapq.heappop(scheduled)
        if not scheduled:
            raise StandstillError("everybody waits, and nothing will ever happen again")
        self.now = max(self.now, scheduled[0].when())
        while scheduled and scheduled[0].when() <= self.now:
            ready.append(heapq.heappop(scheduled))

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: cancelled timers are dropped later, in `_pass_time`."""

    def _write_to_self(self) -> None:
        """Do nothing: there is only one thread."""

    def run_in_executor(  # type: ignore[override] # the base class leaves its types open
        self, executor: Executor | None, func: Callable[..., Result], *args: Any
    ) -> "asyncio.Future[Result]":
        """Run `func` at the end of its virtual seconds."""
        if getattr(executor, "_shutdown", False):
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: asyncio.Future[Result] = self.create_future()
        self.call_later(self._seconds_of(), _settle, future, lambda: func(*args))
        return future


def outcome_of(call: Callable[[], Result]) -> Result | Exception:
    """Return the result of `call`, or the error that it raises."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - the caller gets any error
        return error


def _settle(future: "asyncio.Future[Result]", call: Callable[[], Result]) -> None:
    outcome = outcome_of(call)
    if future.cancelled():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


@contextmanager
def virtual_time(loop: VirtualLoop) -> Iterator[None]:
    """Let `time.perf_counter` return the time of `loop` in the block."""
    real, time.perf_counter = time.perf_counter, loop.time
    try:
        yield
    finally:
        time.perf_counter = real


@dataclass(slots=True)
class Effect:
    """The effect of a call on a device thread.

    The call takes `seconds`, and never returns if they are infinite. Preempting calls may run
    between its `parts`. With `death`, the thread ends with the call.
    """

    seconds: float = 0.0
    parts: int = 1
    death: bool = False


@dataclass(slots=True, eq=False)
class _Call:
    """A call that waits or runs; preempting calls move `ends_at`."""

    future: "asyncio.Future[Any]"
    call: Callable[[], Any]
    effect: Effect = field(default_factory=Effect)
    outcome: Any = None
    began: float = 0.0
    ends_at: float = 0.0
    preempted: float = 0.0


class VirtualThread(DeviceThread):
    """Runs calls one after the other in virtual time.

    A fake device adds the `Effect` of a call to `effects` while the call runs. The result is
    computed at the beginning of the call and returned at its end. As with the real thread: a call
    that is cancelled before it begins is not run, a preempting call runs between two parts of the
    current call or after it, and when the thread ends, its callers get an `InferenceError` and the
    next call starts a new thread.
    """

    def __init__(self, loop: VirtualLoop, effects: list[Effect], name: str) -> None:
        super().__init__(name)
        self._loop = loop
        self._effects = effects
        self._waiting: deque[_Call | None] = deque()
        self._to_preempt: deque[_Call] = deque()
        self._current: _Call | None = None
        self._inner: _Call | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._boundary: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    async def run(self, call: Callable[[], Result], *, preempts: bool = False) -> Result:
        queued = _Call(self._loop.create_future(), call)
        if preempts:
            self._to_preempt.append(queued)
            self._waiting.append(None)
        else:
            self._waiting.append(queued)
        self._idle.clear()
        if self._current is None:
            self._begin_next()
        else:
            self._schedule_preemption()
        result: Result = await queued.future
        return result

    async def close(self, seconds: float) -> None:
        idle = asyncio.ensure_future(self._idle.wait())
        await asyncio.wait({idle}, timeout=seconds)
        idle.cancel()

    def _begin_next(self) -> None:
        """Begin the next call that is not cancelled."""
        while self._current is None and self._waiting:
            waiting = self._waiting.popleft()
            if waiting is None:
                waiting = self._to_preempt.popleft() if self._to_preempt else None
            if waiting is None or waiting.future.cancelled():
                continue
            self._current = waiting
            self._begin(waiting)
            self._timer = self._at(waiting.ends_at, self._end)
            self._schedule_preemption()
        if self._current is None:
            self._idle.set()

    def _begin(self, call: _Call) -> None:
        call.began = self._loop.now
        call.outcome = outcome_of(call.call)
        call.effect = self._effects.pop() if self._effects else Effect()
        call.ends_at = call.began + call.effect.seconds

    def _at(self, moment: float, then: Callable[[], None]) -> asyncio.TimerHandle | None:
        """Set a timer, unless the moment is infinite."""
        return None if moment == float("inf") else self._loop.call_at(moment, then)

    def _end(self) -> None:
        current, self._current = self._current, None
        assert current is not None
        if self._boundary is not None:
            self._boundary.cancel()
            self._boundary = None
        self._give(current)
        self._begin_next()

    def _give(self, call: _Call) -> None:
        """Return the outcome to the caller, or let the thread die."""
        if call.effect.death:
            self._die(call)
        else:
            _settle(call.future, lambda: _value(call.outcome))

    def _die(self, cause: _Call) -> None:
        died = [cause, self._current, *self._waiting, *self._to_preempt]
        self._waiting.clear()
        self._to_preempt.clear()
        if self._timer is not None:
            self._timer.cancel()
        self._current = None
        for call in died:
            if call is not None and not call.future.done():
                error = InferenceError("the device thread ended in the middle of its work")
                call.future.set_exception(error)
        self._idle.set()

    def _schedule_preemption(self) -> None:
        """Let the next preempting call begin after the current part of the current call."""
        current = self._current
        if current is None or self._inner is not None or self._boundary is not None:
            return
        if not self._to_preempt or current.effect.parts < 2 or current.ends_at == float("inf"):
            return
        length = current.effect.seconds / current.effect.parts
        worked = self._loop.now - current.began - current.preempted
        part = int(worked / length + 1e-9) + 1 if length else current.effect.parts
        if part < current.effect.parts:
            moment = current.began + current.preempted + part * length
            self._boundary = self._loop.call_at(moment, self._preempt)

    def _preempt(self) -> None:
        self._boundary = None
        current = self._current
        assert current is not None
        while self._to_preempt:
            inner = self._to_preempt.popleft()
            if inner.future.cancelled():
                continue
            self._inner = inner
            self._begin(inner)
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._at(inner.ends_at, self._resume)
            return

    def _resume(self) -> None:
        """End the preempting call, and continue with the preempted one."""
        inner, self._inner = self._inner, None
        current = self._current
        assert inner is not None
        assert current is not None
        current.preempted += inner.effect.seconds
        current.ends_at += inner.effect.seconds
        self._timer = self._at(current.ends_at, self._end)
        self._give(inner)
        self._schedule_preemption()


def _value(outcome: Any) -> Any:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome
