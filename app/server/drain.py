"""Whether the service still takes work, and how many requests it owes an answer."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Drain:
    """Begun once, by a signal; from then on newcomers are refused and the rest is waited for."""

    def __init__(self) -> None:
        self._begun_at: float | None = None
        self._active = 0
        self._when_over: list[Callable[[], None]] = []
        self._quiet = asyncio.Event()
        self._quiet.set()

    @property
    def begun(self) -> bool:
        """Whether newcomers are refused."""
        return self._begun_at is not None

    def begin(self) -> None:
        """Refuse newcomers from now on; safe to call from a signal handler."""
        if self._begun_at is None:
            self._begun_at = time.monotonic()

    def seconds_left(self, limit: float) -> float:
        """What is left of `limit` seconds since it began; not below 0."""
        elapsed = 0.0 if self._begun_at is None else time.monotonic() - self._begun_at
        return max(0.0, limit - elapsed)

    def when_over(self, call: Callable[[], None]) -> None:
        """Have `call` answer who still waits when the time for the drain is over."""
        self._when_over.append(call)

    def end(self) -> None:
        """The time is over: whoever still waits is answered now."""
        for call in self._when_over:
            call()

    @contextmanager
    def track(self) -> Iterator[None]:
        """Count one request that is owed an answer."""
        self._active += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._active -= 1
            if not self._active:
                self._quiet.set()

    async def wait(self, seconds: float) -> bool:
        """Wait until nothing is owed any more; whether that came true in time."""
        try:
            async with asyncio.timeout(seconds):
                await self._quiet.wait()
        except TimeoutError:
            return False
        return True
