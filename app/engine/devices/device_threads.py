"""The threads of a device: one launches forwards; on a GPU another one collects the results."""

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

from app.engine.devices.outcome import outcome_of
from app.errors import InferenceError

log = structlog.get_logger(__name__)

Result = TypeVar("Result")
_Work = SimpleQueue[Callable[[], object] | None]


class _Current(threading.local):
    """The hook of the current thread for calls that preempt a forward."""

    run_preempting: Callable[[], bool] = staticmethod(lambda: False)


_current = _Current()


def run_preempting_call() -> bool:
    """Run one waiting call that preempts the current one; return whether there was one.

    A model calls this between two layers of a forward. It does nothing in a thread that is not a
    device thread, and within a call that itself preempts another.
    """
    return _current.run_preempting()


class DeviceThread:
    """Runs calls one after the other on its own thread, which is replaced if it dies.

    A `ThreadPoolExecutor` would not replace it, and every later call would wait for ever. The
    thread is a daemon, so that one that never returns from its device does not keep the process
    alive. `initializer` is called first in each thread.
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
        """Run `call`; return its result or raise its error, `InferenceError` if the thread ends.

        With `preempts` it may run within another call: see `run_preempting_call`.
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
        """Let the thread end after the calls so far; wait for it, `seconds` at most.

        Python aborts if it exits while a thread is inside a forward.
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


# Makes a thread from its name and its initializer.
ThreadFactory = Callable[[str, Callable[[], None] | None], DeviceThread]


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

    A GPU has both, so that the next batch is launched while the last one is computed. A CPU
    computes in `launching` and has no `collecting`.
    """

    launching: DeviceThread
    collecting: DeviceThread | None = None

    @property
    def preemptible(self) -> bool:
        """Whether a call may run within another."""
        return self.collecting is None

    @property
    def most_batches(self) -> int:
        """The most batches in flight at once."""
        return 1 if self.preemptible else 2

    async def compute(
        self,
        launch: Callable[[], Callable[[], Result]],
        launched: asyncio.Event,
        *,
        preempts: bool = False,
    ) -> Result:
        """Call `launch`, set `launched`, then call what `launch` returned; return its result.

        If the device is `preemptible`, a call that `preempts` may run within another.
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
