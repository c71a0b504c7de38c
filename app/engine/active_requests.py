"""Counts the requests in work, so that a shutdown can wait for them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class ActiveRequests:
    """The number of requests in work, and an event for when there is none."""

    def __init__(self) -> None:
        self._count = 0
        self._none_left = asyncio.Event()
        self._none_left.set()

    @contextmanager
    def track(self) -> Iterator[None]:
        """Count one request within the block."""
        self._count += 1
        self._none_left.clear()
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._none_left.set()

    async def wait_for_none(self) -> None:
        """Wait until no request is in work."""
        await self._none_left.wait()
