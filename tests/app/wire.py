"""A connection with a fake transport, its app, and the responses written to its client."""

import asyncio
import re
from collections.abc import Callable
from typing import Any

import orjson
import uvicorn
from uvicorn.server import ServerState

from app.connection import BoundedConnection, bounded_connection
from tests.support.skipped_time import run_ready

RESPONSE_TIMEOUT = 30.0


class Wire(asyncio.Transport):
    """The transport of a client that leaves `unread` bytes unread."""

    def __init__(self) -> None:
        super().__init__({"peername": ("192.0.2.1", 7)})
        self.written = b""
        self.unread = 0
        self.ended: str | None = None
        self.sent_eof = False
        self.reading = True
        self.on_close: Callable[[], None] = lambda: None

    def write(self, data: Any) -> None:
        assert not self.sent_eof, "nothing may be written after the end"
        assert self.ended is None, "nothing may be written to what is closed"
        self.written += bytes(data)

    def write_eof(self) -> None:
        self.sent_eof = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def get_write_buffer_size(self) -> int:
        return self.unread

    def is_closing(self) -> bool:
        return self.ended is not None

    def close(self) -> None:
        self._end("closed")

    def abort(self) -> None:
        self._end("aborted")

    def _end(self, how: str) -> None:
        if self.ended is None:
            self.ended = how
            asyncio.get_running_loop().call_soon(self.on_close)


class App:
    """An app that records requests, and responds once `go` is set, with a length or as a stream."""

    def __init__(self, *, held: bool, reads: bool, streams: bool) -> None:
        self.paths: list[str] = []
        self.states: list[dict[str, Any]] = []
        self.bodies: list[bytes] = []
        self.headers: list[list[tuple[bytes, bytes]]] = []
        self.left: list[str] = []
        self.go = asyncio.Event()
        if not held:
            self.go.set()
        self.reads, self.streams = reads, streams
        self.stream_ends = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.paths.append(scope["path"])
        self.states.append(scope["state"])
        self.headers.append(scope["headers"])
        body, more = b"", self.reads
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.append(scope["path"])
                return
            body, more = body + message["body"], message["more_body"]
        self.bodies.append(body)
        await self.go.wait()
        headers = [] if self.streams else [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if self.streams:
            await send({"type": "http.response.body", "body": b"a", "more_body": True})
            await self.stream_ends.wait()
        await send({"type": "http.response.body", "body": b"ok"})


class Client:
    """A connection, its transport, and the app behind it, which may be held until `go`."""

    def __init__(
        self,
        *,
        held: bool = False,
        reads: bool = True,
        streams: bool = False,
    ) -> None:
        self.app = App(held=held, reads=reads, streams=streams)
        self.wire = Wire()
        config = uvicorn.Config(
            self.app, lifespan="off", log_config=None, access_log=False, timeout_keep_alive=75
        )
        config.load()
        self.state = ServerState()
        protocol = bounded_connection(RESPONSE_TIMEOUT)
        self.protocol: BoundedConnection = protocol(config, self.state, {})
        self.wire.on_close = lambda: self.protocol.connection_lost(None)
        self.protocol.connection_made(self.wire)

    async def send(self, data: bytes) -> None:
        self.protocol.data_received(data)
        await run_ready()

    async def send_in_pieces(self, data: bytes, size: int) -> None:
        """Send in pieces until the service closes the connection."""
        for start in range(0, len(data), size):
            if self.wire.ended is None and not self.wire.sent_eof:
                self.protocol.data_received(data[start : start + size])
        await run_ready()

    async def go(self) -> None:
        self.app.go.set()
        await run_ready(100)

    async def wait(self, seconds: int) -> None:
        """Call `tick` once a second until the connection ends."""
        for _ in range(seconds):
            if self.wire.ended is None:
                self.protocol.tick()
                await run_ready()

    @property
    def statuses(self) -> list[int]:
        return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", self.wire.written)]

    @property
    def error(self) -> dict[str, str]:
        """The body of the last response."""
        content: dict[str, str] = orjson.loads(self.wire.written.rpartition(b"\r\n\r\n")[2])
        return content
