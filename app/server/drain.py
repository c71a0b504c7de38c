"""Graceful shutdown: whether new work is refused, and how many accepted requests are in work."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Drain:
    """Begun once, by a signal: new requests are refused from then on, accepted ones finished."""

    def __init__(self) -> None:
        self._begun_at: float | None = None
        self._active = 0
        self._on_timeout: list[Callable[[], None]] = []
        self._idle = asyncio.Event()
        self._idle.set()
        self._announced = asyncio.Event()

    @property
    def begun(self) -> bool:
        """Whether new requests are refused."""
        return self._begun_at is not None

    def begin(self) -> None:
        """Refuse new requests from now on; safe to call from a signal handler."""
        if self._begun_at is None:
            self._begun_at = time.monotonic()

    def announce(self) -> None:
        """Tell those that wait for its beginning; to be called on the event loop."""
        self._announced.set()

    async def wait_for_beginning(self) -> None:
        """Return once it has begun: requests without end have to stop then."""
        await self._announced.wait()

    def seconds_left(self, limit: float) -> float:
        """What is left of `limit` seconds since it began; not below 0."""
        elapsed = 0.0 if self._begun_at is None else time.monotonic() - self._begun_at
        return max(0.0, limit - elapsed)

    def on_timeout(self, callback: Callable[[], None]) -> None:
        """Register what gives an error to the requests that are still in work at the timeout."""
        self._on_timeout.append(callback)

    def time_out(self) -> None:
        """Give an error to every request that is still in work."""
        for callback in self._on_timeout:
            callback()

    @contextmanager
    def track(self) -> Iterator[None]:
        """Count one accepted request."""
        self._active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()

    async def wait(self, seconds: float) -> bool:
        """Wait until every accepted request has its response; False after `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
