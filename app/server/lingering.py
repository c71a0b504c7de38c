"""A transport that closes so that the client can still read what was written to it.

A socket that is closed while data lies unread in it resets the connection, and the client's own
system throws away the answer that it has not read yet. So the end is told first; what still comes
is read and dropped until the client closes too, or has had time enough.
"""

import asyncio
from asyncio.events import AbstractEventLoop, TimerHandle
from contextlib import suppress
from typing import Any

LINGER_TIMEOUT = 10.0


class LingeringTransport(asyncio.Transport):
    """The part of a transport that uvicorn uses, with another `close`."""

    def __init__(self, transport: asyncio.Transport, loop: AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._timer: TimerHandle | None = None

    def close(self) -> None:
        """Send what is written and then the end; read on until the client closes, for a while."""
        if self.is_closing():
            return
        self._timer = self._loop.call_later(LINGER_TIMEOUT, self.end)
        with suppress(OSError):  # The client may be gone already.
            self._transport.write_eof()
        self._transport.resume_reading()

    def end(self) -> None:
        """Send what is written and close, whatever the client still sends."""
        if self._timer is not None:
            self._timer.cancel()
        self._transport.close()

    def abort(self) -> None:
        """Close at once; what is written and not sent is lost."""
        self._transport.abort()

    def is_closing(self) -> bool:
        """Whether nothing more can be written."""
        return self._timer is not None or self._transport.is_closing()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send `data`, unless the end has been told."""
        if self._timer is None:
            self._transport.write(data)

    def get_write_buffer_size(self) -> int:
        """How many bytes are written and not yet taken by the system."""
        return self._transport.get_write_buffer_size()

    def pause_reading(self) -> None:
        """Leave what comes to the system, whose buffer then holds up the client."""
        if self._timer is None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """What is known of the connection."""
        return self._transport.get_extra_info(name, default)
