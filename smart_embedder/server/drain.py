"""Graceful shutdown: whether new work is refused, and how many accepted requests are in work."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from smart_embedder.engine.engine import ActiveRequests


class Drain:
    """A graceful shutdown: once it has begun, new requests are refused.

    Accepted requests are finished. `announced` is set when a signal has come, from which on /health
    tells load balancers to send no more; with SHUTDOWN_DELAY it begins later than that.
    """

    def __init__(self) -> None:
        self.announced = False
        self._begun_at: float | None = None
        self._on_timeout: list[Callable[[], None]] = []
        self._requests = ActiveRequests()
        self._woken = asyncio.Event()

    @property
    def begun(self) -> bool:
        """Whether new requests are refused."""
        return self._begun_at is not None

    def begin(self) -> None:
        """Refuse new requests from now on; safe to call from a signal handler."""
        self.announced = True
        if self._begun_at is None:
            self._begun_at = time.monotonic()

    def wake(self) -> None:
        """Wake those that `wait_for_beginning`; to be called on the event loop."""
        self._woken.set()

    async def wait_for_beginning(self) -> None:
        """Return once it has begun; a stream, which may never end by itself, stops then."""
        await self._woken.wait()

    def seconds_left(self, limit: float) -> float:
        """How many of the `limit` seconds since it began are left; not below 0."""
        elapsed = 0.0 if self._begun_at is None else time.monotonic() - self._begun_at
        return max(0.0, limit - elapsed)

    def on_timeout(self, callback: Callable[[], None]) -> None:
        """Register a callback that fails the requests that are still in work at the timeout."""
        self._on_timeout.append(callback)

    def time_out(self) -> None:
        """Fail every request that is still in work."""
        for callback in self._on_timeout:
            callback()

    def track(self) -> AbstractContextManager[None]:
        """Count one accepted request within the block."""
        return self._requests.track()

    async def wait(self, seconds: float) -> bool:
        """Wait until every accepted request has its response; False after `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._requests.wait_for_none()
        except TimeoutError:
            return False
        return True
