"""The threads that talk to a device: one launches forwards, on a GPU another collects results."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import structlog

from app.engine.outcome import outcome_of
from app.errors import InferenceError

log = structlog.get_logger(__name__)

Result = TypeVar("Result")
_Work = SimpleQueue[Callable[[], object] | None]


class _Current(threading.local):
    """What the calling thread lets in between two parts of a forward."""

    run_preempting: Callable[[], bool] = staticmethod(lambda: False)


_current = _Current()


def run_preempting_call() -> bool:
    """Run a call that preempts the one in which this is called; whether there was one.

    A model calls it between two parts of a forward. In a thread that is no device's, and in a call
    that preempts another, it does nothing.
    """
    return _current.run_preempting()


class DeviceThread:
    """Runs calls one after the other on a thread of its own, which is replaced if it dies.

    `concurrent.futures` keeps counting a thread that died, and every later call would wait for
    ever. The thread is a daemon: one that never comes back from its device must not keep the
    process alive. `initializer` is called first in it, and in each that replaces it.
    """

    def __init__(self, name: str, initializer: Callable[[], None] | None = None) -> None:
        self._name = name
        self._initializer = initializer
        self._lock = threading.Lock()
        self._work: _Work = SimpleQueue()
        self._preempting: deque[Callable[[], None]] = deque()
        self._pending: deque[Future[Any]] = deque()
        self._thread: threading.Thread | None = None

    async def run(self, call: Callable[[], Result], *, preempts: bool = False) -> Result:
        """The result or the error of `call`; if the thread ends in it, `InferenceError`.

        One that `preempts` may run within another: see `run_preempting_call`.
        """
        future: Future[Result] = Future()
        answer = partial(self._answer, future, call)
        with self._lock:
            if self._thread is None:
                self._thread = self._start()
            self._pending.append(future)
            if preempts:
                self._preempting.append(answer)
            self._work.put(self._run_preempting if preempts else answer)
        return await asyncio.wrap_future(future)

    async def close(self, seconds: float) -> None:
        """Let the thread end after the calls that it was given; wait at most `seconds` for it.

        An interpreter that ends while a thread is inside a forward aborts.
        """
        self._work.put(None)
        thread = self._thread
        if thread is not None:
            await asyncio.to_thread(thread.join, seconds)

    def _start(self) -> threading.Thread:
        # A new queue: calls left in that of a dead thread were failed.
        self._work = SimpleQueue()
        self._preempting.clear()
        thread = threading.Thread(
            target=self._serve, args=(self._work,), name=self._name, daemon=True
        )
        thread.start()
        return thread

    def _serve(self, work: _Work) -> None:
        try:
            if self._initializer is not None:
                self._initializer()
            _current.run_preempting = self._run_preempting
            while (call := work.get()) is not None:
                call()
                del call  # It may hold a model that is to be unloaded.
        except SystemExit:
            log.exception("device_thread_ended")
        finally:
            with self._lock:
                self._thread = None
                unanswered, self._pending = self._pending, deque()
            for future in unanswered:
                _fail(future)

    def _run_preempting(self) -> bool:
        if not self._preempting:
            return False
        answer = self._preempting.popleft()
        _current.run_preempting = lambda: False
        try:
            answer()
        finally:
            _current.run_preempting = self._run_preempting
        return True

    def _answer(self, future: "Future[Any]", call: Callable[[], Any]) -> None:
        _answer(future, call)
        self._pending.remove(future)


def _answer(future: "Future[Any]", call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    outcome = outcome_of(call)
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _fail(future: "Future[Any]") -> None:
    if not future.done():
        future.set_exception(InferenceError("the device thread ended in the middle of its work"))


@dataclass(frozen=True, slots=True)
class DeviceThreads:
    """`launching` launches forwards, `collecting` waits for their results.

    Without `collecting` the device computes while a forward is being launched, as a CPU does. With
    it the next batch is on its way before the results of the last one are back, as suits a GPU.
    """

    launching: DeviceThread
    collecting: DeviceThread | None = None

    @property
    def preemptible(self) -> bool:
        """Whether a call may run within another."""
        return self.collecting is None

    @property
    def most_batches(self) -> int:
        """How many batches may be in flight at once."""
        return 1 if self.preemptible else 2

    async def compute(
        self,
        launch: Callable[[], Callable[[], Result]],
        launched: asyncio.Event,
        *,
        preempts: bool = False,
    ) -> Result:
        """Call `launch`, set `launched`, then call what `launch` returned; return its result.

        Where this is `preemptible`, one that `preempts` may run within another.
        """

        def compute_at_once() -> Result:
            return launch()()

        if self.collecting is None:
            return await self.launching.run(compute_at_once, preempts=preempts)
        collect = await self.launching.run(launch)
        launched.set()
        return await self.collecting.run(collect)

    async def close(self, seconds: float) -> None:
        """End both, as `DeviceThread.close`."""
        both = [each for each in (self.launching, self.collecting) if each is not None]
        await asyncio.gather(*(thread.close(seconds) for thread in both))
