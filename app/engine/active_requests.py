"""How many accepted requests are in work: the end of the service waits for them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class ActiveRequests:
    """Counts them."""

    def __init__(self) -> None:
        self._count = 0
        self._none_left = asyncio.Event()
        self._none_left.set()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count a request within the block."""
        self._count += 1
        self._none_left.clear()
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._none_left.set()

    async def none_left(self) -> None:
        """Wait until none is in work."""
        await self._none_left.wait()
