"""An event loop with virtual time, and the threads of devices on it.

Time passes only when nothing else is left to do: the clock then moves to the next timer. Whatever
the engine gives to a thread runs on the loop, at a moment of virtual time, so that a run depends on
nothing but its seed. A step is one callback that the loop runs.
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

# Not 0, which the engine takes for a moment that has not come.
_BEGINNING = 1000.0
_MOST_CANCELLED = 500


@dataclass(frozen=True, slots=True)
class Moments:
    """Whether things tend to happen at one moment, as all seconds are multiples of a 16th."""

    are_common: bool = False

    def rounded(self, seconds: float) -> float:
        if not self.are_common or math.isinf(seconds):
            return seconds
        return math.ceil(seconds * 16) / 16


class StandstillError(Exception):
    """Somebody waits, and nothing will ever happen again."""


class VirtualLoop(asyncio.BaseEventLoop):
    """`on_quiet` is called before time passes.

    A call in an executor takes `seconds_of()` seconds, and runs at the end of that time.
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
        """Run callbacks until the loop is to stop; the base class runs them in rounds."""
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
        """Move to the moment of the next timer, and make ready all timers of that moment."""
        scheduled, ready = self._scheduled, self._ready
        if len(scheduled) > _MOST_CANCELLED:
            scheduled[:] = [each for each in scheduled if not each._cancelled]
            heapq.heapify(scheduled)
        while scheduled and scheduled[0]._cancelled:
            heapq.heappop(scheduled)
        if not scheduled:
            raise StandstillError("everybody waits, and nothing will ever happen again")
        self.now = max(self.now, scheduled[0].when())
        while scheduled and scheduled[0].when() <= self.now:
            ready.append(heapq.heappop(scheduled))

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers are dropped when their time comes, or when there are many."""

    def _write_to_self(self) -> None:
        """Nobody has to be woken: there is one thread."""

    def run_in_executor(  # type: ignore[override] # the base class leaves its types open
        self, executor: Executor | None, func: Callable[..., Result], *args: Any
    ) -> "asyncio.Future[Result]":
        """Run `func` when the time that it takes is over."""
        if getattr(executor, "_shutdown", False):
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: asyncio.Future[Result] = self.create_future()
        self.call_later(self._seconds_of(), _settle, future, lambda: func(*args))
        return future


def outcome_of(call: Callable[[], Result]) -> Result | Exception:
    """What `call` returns, or the error that it raises."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - whoever waits for it gets any error
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
    """Let the engine's clock show the time of `loop` within the block."""
    real, time.perf_counter = time.perf_counter, loop.time
    try:
        yield
    finally:
        time.perf_counter = real


@dataclass(slots=True)
class Effect:
    """What a call on a device's thread takes: `seconds`, of which it never returns if infinite.

    Between its `parts` calls that preempt it may run. After a `death` its thread ends.
    """

    seconds: float = 0.0
    parts: int = 1
    death: bool = False


@dataclass(slots=True, eq=False)
class _Call:
    """A call that waits or runs; `ends_at` moves on by what preempts it."""

    future: "asyncio.Future[Any]"
    call: Callable[[], Any]
    effect: Effect = field(default_factory=Effect)
    outcome: Any = None
    began: float = 0.0
    ends_at: float = 0.0
    preempted: float = 0.0


class VirtualThread(DeviceThread):
    """Runs calls one after the other, each when those before it have taken their time.

    A fake device leaves the `Effect` of a call in `effects` while the call runs. The results of a
    call are made at its beginning and given at its end. As with the real one: a call whose caller
    has left before it began is not run, a call that preempts runs between two parts of the current
    one or after it, and when the thread ends its callers get an `InferenceError` and the next call
    begins a new one.
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
        own = _Call(self._loop.create_future(), call)
        if preempts:
            self._to_preempt.append(own)
            self._waiting.append(None)
        else:
            self._waiting.append(own)
        self._idle.clear()
        if self._current is None:
            self._next()
        else:
            self._look_for_boundary()
        result: Result = await own.future
        return result

    async def close(self, seconds: float) -> None:
        idle = asyncio.ensure_future(self._idle.wait())
        await asyncio.wait({idle}, timeout=seconds)
        idle.cancel()

    def _next(self) -> None:
        """Begin the next call whose caller still waits."""
        while self._current is None and self._waiting:
            waiting = self._waiting.popleft()
            if waiting is None:
                waiting = self._to_preempt.popleft() if self._to_preempt else None
            if waiting is None or waiting.future.cancelled():
                continue
            self._current = waiting
            self._begin(waiting)
            self._timer = self._at(waiting.ends_at, self._end)
            self._look_for_boundary()
        if self._current is None:
            self._idle.set()

    def _begin(self, call: _Call) -> None:
        call.began = self._loop.now
        call.outcome = outcome_of(call.call)
        call.effect = self._effects.pop() if self._effects else Effect()
        call.ends_at = call.began + call.effect.seconds

    def _at(self, moment: float, then: Callable[[], None]) -> asyncio.TimerHandle | None:
        """A timer; none for a call that never returns."""
        return None if moment == float("inf") else self._loop.call_at(moment, then)

    def _end(self) -> None:
        current, self._current = self._current, None
        assert current is not None
        if self._boundary is not None:
            self._boundary.cancel()
            self._boundary = None
        self._give(current)
        self._next()

    def _give(self, call: _Call) -> None:
        """Give the caller its result, or let the thread die of it."""
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

    def _look_for_boundary(self) -> None:
        """Let the next call that preempts begin between two parts of the current one."""
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
        """The call that preempted has returned; go on with the one that was preempted."""
        inner, self._inner = self._inner, None
        current = self._current
        assert inner is not None
        assert current is not None
        current.preempted += inner.effect.seconds
        current.ends_at += inner.effect.seconds
        self._timer = self._at(current.ends_at, self._end)
        self._give(inner)
        self._look_for_boundary()


def _value(outcome: Any) -> Any:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome
