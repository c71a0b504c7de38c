"""A request's body as it comes, and an end for one that does not."""

import asyncio

from starlette.types import Message, Receive

from app.errors import BodyStalledError

MIN_BYTES_PER_SECOND = 1024
# A process that was stopped finds its timers overdue before it has read what arrived meanwhile.
_LAST_LOOK = 0.25


class TimedBody:
    """Passes a body on; raises `BodyStalledError` where it comes too slowly.

    Each `window` of seconds must bring MIN_BYTES_PER_SECOND or the end of the body, the first one
    included. `end` makes it raise before its time.
    """

    def __init__(self, receive: Receive, window: float) -> None:
        self._receive = receive
        self._window = window
        self._came = 0
        self._ends = asyncio.get_running_loop().time() + window
        self._limit: asyncio.Timeout | None = None
        self._ended = False
        self.complete = False

    async def receive(self) -> Message:
        """The next part of the body, or whatever comes after it."""
        if self.complete:
            return await self._receive()
        late = False
        try:
            message = await self._receive_until(self._ends)
        except TimeoutError:
            message, late = await self._look_again(), True
        self._came += len(message.get("body", b""))
        self.complete = not message.get("more_body", False)
        if late:
            self._begin_window()
        return message

    def end(self) -> None:
        """Let the request be refused now, as one whose body does not come."""
        self._ended = True
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time())

    async def _receive_until(self, moment: float) -> Message:
        if self._ended:
            raise self._error()
        try:
            async with asyncio.timeout_at(moment) as self._limit:
                return await self._receive()
        finally:
            self._limit = None

    async def _look_again(self) -> Message:
        """What lies there in spite of the time."""
        try:
            return await self._receive_until(asyncio.get_running_loop().time() + _LAST_LOOK)
        except TimeoutError:
            raise self._error() from None

    def _begin_window(self) -> None:
        if not self.complete and self._came < MIN_BYTES_PER_SECOND * self._window:
            raise self._error()
        self._came = 0
        self._ends = asyncio.get_running_loop().time() + self._window

    def _error(self) -> BodyStalledError:
        if self._ended:
            return BodyStalledError(
                "the body did not go on for a second while memory was short: send it without pause"
            )
        return BodyStalledError(
            f"the body came too slowly: {self._window:g} s must bring the rest of it, "
            f"or {MIN_BYTES_PER_SECOND} bytes a second"
        )
