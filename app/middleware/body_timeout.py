"""A request body with a minimum rate at which it must arrive."""

import asyncio

from starlette.types import Message, Receive

from app.errors import BodyStalledError

MIN_BYTES_PER_SECOND = 1024
# After a process was stopped, timers expire before the bytes that arrived meanwhile are read.
_GRACE_SECONDS = 0.25


class TimedBody:
    """Passes a body on; raises `BodyStalledError` where it arrives too slowly.

    In each `window` of seconds MIN_BYTES_PER_SECOND or the rest of the body must arrive. `time_out`
    makes it raise earlier.
    """

    def __init__(self, receive: Receive, window: float) -> None:
        self._receive = receive
        self._window = window
        self._bytes_in_window = 0
        self._window_end = asyncio.get_running_loop().time() + window
        self._timeout: asyncio.Timeout | None = None
        self._timed_out = False
        self.complete = False

    async def receive(self) -> Message:
        """The next message: a part of the body, or what follows it."""
        if self.complete:
            return await self._receive()
        late = False
        try:
            message = await self._receive_until(self._window_end)
        except TimeoutError:
            message, late = await self._receive_within_grace(), True
        self._bytes_in_window += len(message.get("body", b""))
        self.complete = not message.get("more_body", False)
        if late:
            self._begin_window()
        return message

    def time_out(self) -> None:
        """Fail the request now, because its body stalls while memory is short."""
        self._timed_out = True
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())

    async def _receive_until(self, moment: float) -> Message:
        if self._timed_out:
            raise self._error()
        try:
            async with asyncio.timeout_at(moment) as self._timeout:
                return await self._receive()
        finally:
            self._timeout = None

    async def _receive_within_grace(self) -> Message:
        """A message that has arrived although the time is over."""
        try:
            return await self._receive_until(asyncio.get_running_loop().time() + _GRACE_SECONDS)
        except TimeoutError:
            raise self._error() from None

    def _begin_window(self) -> None:
        if not self.complete and self._bytes_in_window < MIN_BYTES_PER_SECOND * self._window:
            raise self._error()
        self._bytes_in_window = 0
        self._window_end = asyncio.get_running_loop().time() + self._window

    def _error(self) -> BodyStalledError:
        if self._timed_out:
            return BodyStalledError(
                "the body did not go on for a second while memory was short: send it without pause"
            )
        return BodyStalledError(
            f"the body came too slowly: {self._window:g} s must bring the rest of it, "
            f"or {MIN_BYTES_PER_SECOND} bytes a second"
        )
