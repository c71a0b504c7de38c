"""Interrupt running work: for a preempting call, after a time limit, or when it is given up."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar

# Set when the caller of the call that runs on this thread was cancelled.
_given_up: ContextVar[threading.Event | None] = ContextVar("given_up", default=None)

# Its attribute `preempting` has the calls that may preempt the current call of the thread.
_current = threading.local()


def run_preempting_call() -> bool:
    """Run a waiting call that preempts the current one; return False if there is none.

    Models call this between two layers of a forward. It does nothing outside device threads, and
    within a preempting call.
    """
    waiting: deque[Callable[[], None]] | None = getattr(_current, "preempting", None)
    if not waiting:
        return False
    call = waiting.popleft()
    _current.preempting = None
    try:
        call()
    finally:
        _current.preempting = waiting
    return True


class GivenUpError(Exception):
    """The caller of a call was cancelled; raised only on the call's own thread."""


def stop_if_given_up() -> None:
    """Raise `GivenUpError` if the caller of the call on this thread was cancelled."""
    given_up = _given_up.get()
    if given_up is not None and given_up.is_set():
        raise GivenUpError


@asynccontextmanager
async def failing_with(
    error: Callable[[], Exception], seconds: float | None = None
) -> AsyncIterator[asyncio.Timeout]:
    """Raise the error that `error` returns when the block takes longer than `seconds`.

    Yields the timeout, which can be rescheduled: `reschedule(0)` ends the block at once.
    """
    try:
        async with asyncio.timeout(seconds) as timeout:
            yield timeout
    except TimeoutError:
        if not timeout.expired():
            raise
        raise error() from None
