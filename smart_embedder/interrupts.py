"""Interrupts of running work: by shorter calls, by a time limit, or once nobody waits for it."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar

# Set when nobody waits any longer for the result of the call that runs on this thread.
_given_up: ContextVar[threading.Event | None] = ContextVar("given_up", default=None)

# Of each thread, `preempting`: the calls that may preempt its current one.
_current = threading.local()


def run_preempting_call() -> bool:
    """Run one waiting call that preempts the current one; return whether there was one.

    A model calls this between two layers of a forward. It does nothing in a thread that is not a
    device thread, and within a call that itself preempts another.
    """
    waiting: deque[Callable[[], None]] | None = getattr(_current, "preempting", None)
    if not waiting:
        return False
    answer = waiting.popleft()
    _current.preempting = None
    try:
        answer()
    finally:
        _current.preempting = waiting
    return True


class GivenUpError(Exception):
    """Nobody waits for the result of this call any longer; seen only on its thread."""


def stop_if_given_up() -> None:
    """Raise `GivenUpError` where nobody waits any longer for the call that runs on this thread."""
    given_up = _given_up.get()
    if given_up is not None and given_up.is_set():
        raise GivenUpError


@asynccontextmanager
async def failing_with(
    error: Callable[[], Exception], seconds: float | None = None
) -> AsyncIterator[asyncio.Timeout]:
    """A block that raises what `error` makes after `seconds`.

    Whoever has the timeout that it yields can `reschedule` that, such as to 0: at once.
    """
    try:
        async with asyncio.timeout(seconds) as timeout:
            yield timeout
    except TimeoutError:
        if not timeout.expired():
            raise
        raise error() from None
