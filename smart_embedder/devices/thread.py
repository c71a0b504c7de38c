"""Threads that run calls on a device, and the conversion of a device's errors.

This module knows no batches.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import structlog

from smart_embedder.errors import (
    DeviceCrashedError,
    DeviceFailedError,
    InferenceError,
    OutOfMemoryError,
)
from smart_embedder.interrupts import _current, run_preempting_call

log = structlog.get_logger(__name__)

Result = TypeVar("Result")
_Work = SimpleQueue[Callable[[], object] | None]


class DeviceThread:
    """Runs calls one after the other on a thread, which is replaced if it dies.

    A `ThreadPoolExecutor` would not replace it, and every later call would wait for ever. The
    thread is a daemon, so that a call that never returns does not keep the process alive.
    `initializer` is called first in each thread.
    """

    def __init__(self, name: str, initializer: Callable[[], None] | None = None) -> None:
        self._name = name
        self._initializer = initializer
        self._lock = threading.Lock()
        self._work: _Work = SimpleQueue()
        self._preempting: deque[Callable[[], None]] = deque()
        self._pending: deque[asyncio.Future[Any]] = deque()
        self._thread: threading.Thread | None = None

    async def run(self, call: Callable[[], Result], *, preempts: bool = False) -> Result:
        """Run `call` and return its result. Raise `InferenceError` if the thread ends.

        With `preempts`, the call may run within another one: see `run_preempting_call`.
        """
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        # The thread takes the call out, so that it holds no model when the caller has the result.
        run_call = partial(self._run_call, future, [call])
        with self._lock:
            if self._thread is None:
                self._thread = self._start()
            self._pending.append(future)
            if preempts:
                self._preempting.append(run_call)
            self._work.put(run_preempting_call if preempts else run_call)
        return await future

    async def close(self, seconds: float) -> None:
        """End the thread after the current calls; wait for at most `seconds`.

        Python aborts if it exits while a thread is inside a forward.
        """
        self._work.put(None)
        thread = self._thread
        if thread is not None:
            await asyncio.to_thread(thread.join, seconds)

    def _start(self) -> threading.Thread:
        # The calls in the queue of a dead thread have failed, so start with an empty one.
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
            _current.preempting = self._preempting
            while (call := work.get()) is not None:
                call()
                del call  # Its future may hold a loaded model.
        except SystemExit:
            log.exception("device_thread_ended")
        finally:
            with self._lock:
                self._thread = None
                unanswered, self._pending = self._pending, deque()
            for future in unanswered:
                error = InferenceError("the device thread ended in the middle of its work")
                _resolve(future, future.set_exception, error)

    def _run_call(self, future: "asyncio.Future[Any]", calls: list[Callable[[], Any]]) -> None:
        resolve, outcome = future.set_result, None
        if not future.cancelled():
            try:
                outcome = calls.pop()()
            except Exception as error:  # noqa: BLE001 - the caller handles the error
                resolve, outcome = future.set_exception, error
        _resolve(future, resolve, outcome)
        self._pending.remove(future)


def _resolve(
    future: "asyncio.Future[Any]", resolve: Callable[[Any], None], outcome: object
) -> None:
    """Let the future's event loop call `resolve`, unless the future is done by then."""

    def resolve_unless_done() -> None:
        if not future.done():
            resolve(outcome)

    with suppress(RuntimeError):  # The loop is closed.
        future.get_loop().call_soon_threadsafe(resolve_unless_done)


# Makes a thread from a name and an initializer.
ThreadFactory = Callable[[str, Callable[[], None] | None], DeviceThread]


_RETRY_AFTER = 30
# Messages in plain RuntimeErrors of PyTorch's allocators and libraries, and of CUDA's driver.
_OUT_OF_MEMORY_MESSAGES = (
    "out of memory",
    "can't allocate memory",
    "ALLOC_FAILED",
    "OUT_OF_MEMORY",
    # On a slice of a GPU (MIG), PyTorch may not query which process uses the memory.
    "NVML_SUCCESS ==",
)
# Error codes of CUDA's runtime; HIP has the same. After these errors the device still works: wrong
# arguments, no kernel for this GPU, too few resources for a launch, not supported, a capture.
_TRANSIENT_CODES = frozenset(
    {1, 9, 98, 209, 222, 400, 600, 701, 720, 801, *range(900, 909), 910, 912}
)
# Errors of the device itself, independent of the work: it is taken, gone, or lost to another
# process, or its memory or its links are broken.
_HARDWARE_CODES = frozenset({46, 100, 101, 201, 214, 220, 709, 806, 810, 911, 999})


def run_guarded(call: Callable[[], Result], free_memory: Callable[[], object]) -> Result:
    """Run `call` in a device thread and convert the errors of the device.

    If memory runs out, calls `free_memory` and raises `OutOfMemoryError`. If every later call would
    fail too, raises `DeviceFailedError`, or `DeviceCrashedError` if the call may be the cause.
    """
    try:
        return call()
    except (MemoryError, RuntimeError) as error:
        # Errors are recognised by class name, code and message, because this module does not import
        # torch.
        names = {class_.__name__ for class_ in type(error).__mro__}
        number = getattr(error, "error_code", None)
        code = number if isinstance(number, int) else None
        if (
            isinstance(error, MemoryError)
            or type(error).__name__ == "OutOfMemoryError"
            or any(message in str(error) for message in _OUT_OF_MEMORY_MESSAGES)
        ):
            pass
        elif "AcceleratorError" not in names or code in _TRANSIENT_CODES:
            raise
        elif code in _HARDWARE_CODES:
            raise DeviceFailedError(
                "a device has failed while it computed this", retry_after=_RETRY_AFTER
            ) from error
        else:
            raise DeviceCrashedError(
                "a device has failed while it computed this, which may be the cause and is "
                "computed on no other"
            ) from error
        note = str(error)
    # Outside the handler, because `error` references the tensors of the failed forward.
    free_memory()
    failure = OutOfMemoryError(
        "the device has too little memory for this", retry_after=_RETRY_AFTER
    )
    failure.add_note(note)
    raise failure
