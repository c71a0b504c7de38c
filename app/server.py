"""uvicorn's server with a graceful shutdown that loses no request.

uvicorn closes its port at once. The system then refuses new connections, and resets those in the
backlog, which the server has not accepted yet. This server keeps its port open and answers 503
until every accepted request has its response. Then it keeps new connections out and serves those in
the backlog.
"""

import asyncio
import ctypes
import os
import select
import signal
import socket
import struct
import sys
from contextlib import suppress
from types import FrameType
from typing import Any

import structlog
import uvicorn

from app.connection import BoundedConnection
from app.middleware.draining import Drain

log = structlog.get_logger(__name__)

_SHARE_FOR_RESPONSES = 0.9
_SIGNAL_STATUS = 128
# uvicorn calls `on_tick` ten times a second.
_TICKS_PER_SECOND = 10
# How long connections may stay open once every request has its response, and how often to check.
_LINGER_SECONDS = 1.0
_POLL_SECONDS = 0.02
# After this time, handshakes that began before new connections were kept out are complete.
_HANDSHAKE_SECONDS = 0.1
# A wildcard address cannot be called, so the log shows the loopback address instead.
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104

# A classic BPF program for the kernel's socket filter: (operation, jump if true, if false, k).
_LOAD_BYTE, _JUMP_IF_SET, _RETURN = 0x30, 0x45, 0x06
_TCP_FLAGS, _SYN, _WHOLE_PACKET = 13, 0x02, 0xFFFF_FFFF
_DROP_SYN = (
    (_LOAD_BYTE, 0, 0, _TCP_FLAGS),
    (_JUMP_IF_SET, 0, 1, _SYN),
    (_RETURN, 0, 0, 0),
    (_RETURN, 0, 0, _WHOLE_PACKET),
)
_SO_ATTACH_FILTER = 26


class DrainingServer(uvicorn.Server):
    """A server that drains after a signal: `delay` seconds after SIGTERM, at once after SIGINT.

    After nine tenths of `timeout` seconds the drain times out, so that there is time left to send
    an error to every request in work. The port is closed when every client has read its response,
    or after a second. A second signal ends the process at once. The log has the begin of the drain,
    the number of requests in work, the number of aborted requests, and the end.
    """

    def __init__(
        self, config: uvicorn.Config, drain: Drain, timeout: float, delay: float = 0.0
    ) -> None:
        super().__init__(config)
        self._drain = drain
        self._timeout = timeout
        self._delay = delay
        self._aborted = 0

    @property
    def url(self) -> str:
        """The URL at which the server can be called."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        host = _LOOPBACK.get(host, host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and log the URL."""
        await super().startup(sockets)
        if self.started:
            log.info("listening", url=self.url)

    def handle_exit(self, sig: int, _frame: FrameType | None) -> None:
        """Begin to drain; at a second signal, exit with the status of that signal."""
        name = signal.Signals(sig).name
        if self._drain.announced:
            # Not through the log, which the signal may have interrupted while it was writing, and
            # not to a full pipe, which would block.
            if has_event(2, "POLLOUT"):
                in_work = f"with {self._drain.count} requests in work"
                os.write(2, f"second signal ({name}): ended at once, {in_work}\n".encode())
            os._exit(_SIGNAL_STATUS + sig)
        self._drain.announced = True
        loop = asyncio.get_running_loop()
        delay = self._delay if sig == signal.SIGTERM else 0.0
        if not delay:
            self._drain.begin()  # Before any other callback of the loop.
        loop.call_soon_threadsafe(self._announce, name, delay)

    def _announce(self, signal_name: str, delay: float) -> None:
        if not delay:
            self._begin_to_drain(signal_name)
            return
        log.info("shutdown_announced", signal=signal_name, drains_in_seconds=delay)
        asyncio.get_running_loop().call_later(delay, self._begin_to_drain, signal_name)

    def _begin_to_drain(self, signal_name: str) -> None:
        self._drain.begin()
        log.info(
            "draining",
            signal=signal_name,
            requests_in_work=self._drain.count,
            most_seconds=self._timeout,
        )
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Once a second, let each connection count how long it has waited for its client."""
        if counter % _TICKS_PER_SECOND == 0:
            for connection in [*self.server_state.connections]:
                if isinstance(connection, BoundedConnection):
                    connection.tick()
        return await super().on_tick(counter)

    async def main_loop(self) -> None:
        """Serve until a signal arrives and every accepted request has its response."""
        await super().main_loop()
        self._drain.begin()
        try:
            async with asyncio.timeout(
                self._drain.seconds_left(self._timeout * _SHARE_FOR_RESPONSES)
            ):
                await self._drain.wait_for_none()
        except TimeoutError:
            self._aborted = self._drain.count
            self._drain.time_out()
        await self._finish_connections()
        # uvicorn declares whole seconds, but only passes them to asyncio, which takes fractions.
        self.config.timeout_graceful_shutdown = self._drain.seconds_left(self._timeout)  # type: ignore[assignment]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the remaining connections, and log the end."""
        await super().shutdown(sockets)
        seconds = self._timeout - self._drain.seconds_left(self._timeout)
        log.info("stopped", requests_aborted=self._aborted, drained_seconds=round(seconds, 3))

    async def _finish_connections(self) -> None:
        """Keep new connections out, and wait until each client has read its response."""
        listeners = [listener.fileno() for server in self.servers for listener in server.sockets]
        for listener in listeners:
            _refuse_new_connections(listener)
        left = self._drain.seconds_left(self._timeout)
        await asyncio.sleep(min(_HANDSHAKE_SECONDS, left))
        with suppress(TimeoutError):
            async with asyncio.timeout(min(_LINGER_SECONDS, left)):
                # uvicorn has no event for the end of a connection.
                while self.server_state.connections or any(map(_has_backlog, listeners)):  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_SECONDS)


def has_event(connection: Any, event: str) -> bool:
    """Whether a socket, or its descriptor, has this event of `select.poll` now. Reads nothing.

    False on systems without `select.poll`.
    """
    if not hasattr(select, event):
        return False
    poll = select.poll()
    poll.register(connection, getattr(select, event))
    return bool(poll.poll(0))


def _refuse_new_connections(listener: int) -> None:
    """Refuse new connections at a listening descriptor; those in the backlog stay.

    On Linux, a filter drops the first packet (SYN) of new connections: the client's system sends it
    again after a second and then finds the port closed. Elsewhere the backlog is limited to the
    connections that it holds.
    """
    with socket.socket(fileno=os.dup(listener)) as duplicate:
        if sys.platform != "linux" or not _drop_syn(duplicate):
            duplicate.listen(0)


def _has_backlog(listener: int) -> bool:
    """Whether connections wait to be accepted."""
    return has_event(listener, "POLLIN")


def _drop_syn(listener: socket.socket) -> bool:
    """Attach the filter; return False if the kernel refuses it, as some sandboxes do."""
    program = b"".join(struct.pack("HBBI", *instruction) for instruction in _DROP_SYN)
    memory = ctypes.create_string_buffer(program, len(program))
    option = struct.pack("@HP", len(_DROP_SYN), ctypes.addressof(memory))
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, option)
    except OSError:
        return False
    return True
