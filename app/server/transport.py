"""The layer between a connection and its socket: timers, flow control, and a lingering close.

A socket that is closed while unread data lies in it resets the connection, and the client's system
then discards the response that the client has not read yet. `LingeringTransport` therefore shuts
down only the sending side first, and drops what still arrives until the client closes or a timeout.
"""

import asyncio
import select
from asyncio.events import AbstractEventLoop, TimerHandle
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl

LINGER_TIMEOUT = 10.0


def has_hung_up(connection: Any) -> bool:
    """Whether the other side of a socket has closed, even while it is not being read.

    False on systems that cannot tell (only Linux has POLLRDHUP).
    """
    if connection is None or not hasattr(select, "POLLRDHUP"):
        return False
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))


class Timer:
    """A timeout that can be cancelled; starting it again while it runs changes nothing.

    It holds its callback only while it runs, so that it adds no reference cycle to a connection.
    """

    def __init__(self, loop: AbstractEventLoop) -> None:
        self._loop = loop
        self._handle: TimerHandle | None = None

    def start(self, seconds: float, callback: Callable[[], None], *, grace: float = 0.0) -> None:
        """Call `callback` after `seconds`, and `grace` seconds more of running time.

        A process that was stopped finds its timers overdue before it has read what arrived
        meanwhile; the grace lets it read first.
        """
        if self._handle is None:
            self._handle = self._loop.call_later(seconds, self._expire, callback, grace)

    def cancel(self) -> None:
        """Do not call back."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _expire(self, callback: Callable[[], None], grace: float) -> None:
        if grace:
            self._handle = self._loop.call_later(grace, self._expire, callback, 0.0)
            return
        self._handle = None
        callback()


class LingeringTransport(asyncio.Transport):
    """The part of a transport that uvicorn uses, with a lingering `close`."""

    def __init__(self, transport: asyncio.Transport, loop: AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._linger_timer: TimerHandle | None = None

    def close(self) -> None:
        """Send what is written, then end of file; read on until the client closes or a timeout."""
        if self.is_closing():
            return
        self._linger_timer = self._loop.call_later(LINGER_TIMEOUT, self.close_without_lingering)
        with suppress(OSError):  # The client may have closed already.
            self._transport.write_eof()
        self._transport.resume_reading()

    def close_without_lingering(self) -> None:
        """Send what is written and close, whatever the client still sends."""
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        self._transport.close()

    def abort(self) -> None:
        """Close at once; what is written and not sent is lost."""
        self._transport.abort()

    def is_closing(self) -> bool:
        """Whether nothing more can be written."""
        return self._linger_timer is not None or self._transport.is_closing()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send `data`, unless the connection is being closed."""
        if self._linger_timer is None:
            self._transport.write(data)

    def get_write_buffer_size(self) -> int:
        """How many written bytes the system has not taken yet."""
        return self._transport.get_write_buffer_size()

    def pause_reading(self) -> None:
        """Leave what arrives in the system's buffer, whose size then stops the client."""
        if self._linger_timer is None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """A fact about the connection, as asyncio's transports tell it."""
        return self._transport.get_extra_info(name, default)


class BoundedFlowControl(FlowControl):
    """uvicorn's flow control, which resumes reading whenever a response ends or a body is awaited.

    It resumes only while `can_read` allows it.
    """

    def __init__(self, transport: asyncio.Transport, can_read: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._can_read: Callable[[], bool] | None = can_read

    def resume_reading(self) -> None:
        """Read again, if there is room for what arrives."""
        if self._can_read is not None and self._can_read():
            super().resume_reading()

    def detach(self) -> None:
        """Never resume reading again; drops the reference to the connection."""
        self._can_read = None
