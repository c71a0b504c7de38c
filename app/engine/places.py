"""Places: how many requests of a kind may be inside at once."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from app.errors import QueueFullError


class Places:
    """At most `capacity` holders; who finds none free waits `patience` seconds, then is refused.

    `seconds_to_clear` tells a refused caller when another try makes sense.
    """

    def __init__(
        self, capacity: int, patience: float, full: str, seconds_to_clear: Callable[[], int]
    ) -> None:
        self._patience = patience
        self._full = full
        self._seconds_to_clear = seconds_to_clear
        self._free = asyncio.Semaphore(capacity)
        self._taken = 0

    @property
    def taken(self) -> int:
        """How many hold a place."""
        return self._taken

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Hold a place; raise `QueueFullError` when none comes free in time."""
        try:
            async with asyncio.timeout(self._patience):
                await self._free.acquire()
        except TimeoutError:
            raise QueueFullError(self._full, retry_after=self._seconds_to_clear()) from None
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1
            self._free.release()
