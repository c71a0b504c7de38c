"""Fuzzes heads and bodies of HTTP/1.1 on the real connection, with a transport in memory.

The requests that reach the app must equal those that h11 reads, however the bytes are cut.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import h11
import uvicorn
from uvicorn.server import ServerState

from app.connection import MAX_HEADER_BYTES, bounded_connection
from tests.app.wire import Wire
from tests.fuzzing.inputs import Target, cut, linear, read_input, seeds_of
from tests.support.skipped_time import SkippingLoop, run_ready

# Skipped seconds: in the first, everything that is ready runs; in the second, limits expire.
_A_MOMENT, _AN_HOUR = 0.001, 3600.0
_RESPONSE_SECONDS = 30.0
_ADDRESS = re.compile(rb"^[a-z]+://[^/?#]*", re.IGNORECASE)
# Method, path with query, headers, and body.
Request = tuple[bytes, bytes, list[tuple[bytes, bytes]], bytes]


class Faults(logging.Handler):
    """Collects errors that uvicorn logs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record))


def seeds() -> Iterator[bytes]:
    """Yield requests of every kind, single and pipelined."""
    get = b"GET /health?a=%20b HTTP/1.1\r\nHost: x\r\n\r\n"
    post = b"POST /rerank HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello"
    chunked = (
        b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        b'3\r\nabc\r\n5;x="y"\r\nhello\r\n0\r\nTrailer: t\r\n\r\n'
    )
    upgrade = (
        b"GET /ui HTTP/1.1\r\nHost: x\r\nConnection: keep-alive, Upgrade\r\nUpgrade: h2c\r\n"
        b"HTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n"
    )
    expect = b"POST /b HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n{}"
    old = b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
    head = b"HEAD / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAccept: */*;q=0.5\r\n\r\n"
    connect = b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n"
    both = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
    folded = b"GET / HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n"
    absolute = (
        b"GET http://x:80/a?#b HTTP/1.1\r\nHost: x\r\n\r\nGET /#a?b HTTP/1.1\r\nHost: x\r\n\r\n"
    )
    contents = [absolute, get, post, chunked, upgrade, expect, old, head, connect, folded]
    contents += [both + b"0\r\n\r\n", get * 20, post + upgrade + chunked + get]
    return seeds_of([*contents, b"\r\n" + get + b"x", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])


def check(data: bytes) -> None:
    """Compare the requests with those of h11, whole and cut."""
    chance, content = read_input(data)
    with linear(content, calls_per_byte=60, calls_beside=100_000):
        whole = _serve([content] if content else [])
    with linear(content, calls_per_byte=1500, calls_beside=100_000):
        in_pieces = _serve(cut(content, chance))
    expected = read_plainly(content)
    for requests, answered, has_ended in (whole, in_pieces):
        for request, reference in zip(requests, expected, strict=False):
            assert request == reference
        if len(expected) > len(requests):
            # The next request was refused: by a status, by the last response, or by closing.
            last = answered.rpartition(b"HTTP/1.1 ")[2]
            is_refused = last[:3] in {b"400", b"431"} or b"connection: close" in last
            assert is_refused or has_ended, answered[-300:]


def _serve(pieces: list[bytes]) -> tuple[list[Request], bytes, bool]:
    """Return the requests that reached the app, the responses, and whether the server closed."""
    requests: list[Request] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers, body, more = list(scope["headers"]), b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        assert scope["headers"] == headers, "trailers are no headers"
        query = scope["query_string"]
        target = scope["raw_path"] + (b"?" + query if query else b"")
        requests.append((scope["method"].encode(), target, _plain_headers(headers), body))
        length = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": length})
        await send({"type": "http.response.body", "body": b"ok"})

    http = bounded_connection(_RESPONSE_SECONDS)
    http.log = SimpleNamespace(warning=lambda *_, **__: None)
    config = uvicorn.Config(app, http=http, ws="none", lifespan="off", log_config=None)
    config.load()
    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        answered, has_ended = runner.run(_converse(lambda: http(config, ServerState(), {}), pieces))
    return requests, answered, has_ended


async def _converse(connect: Callable[[], Any], pieces: list[bytes]) -> tuple[bytes, bool]:
    """Send the pieces; return the responses, and whether the connection was closed.

    Fails on any logged error, and if tasks or connections are left behind.
    """
    connection, faults, wire = connect(), Faults(), Wire()
    connection.logger = logging.getLogger(__name__)
    connection.logger.handlers, connection.logger.propagate = [faults], False
    asyncio.get_running_loop().set_exception_handler(lambda _, of: faults.found.append(repr(of)))
    wire.on_close = lambda: connection.connection_lost(None)
    connection.connection_made(wire)
    for piece in pieces:
        if not wire.reading:
            await asyncio.sleep(_A_MOMENT)
        assert wire.reading or wire.ended, "reading is never resumed"
        if wire.ended:
            break
        connection.data_received(piece)
        await run_ready(1)
    await asyncio.sleep(_A_MOMENT)
    answered, has_ended = wire.written, wire.ended is not None
    wire.close()
    await asyncio.sleep(_AN_HOUR)
    assert not faults.found, faults.found[0]
    assert not connection.tasks, "a request runs although its connection is closed"
    assert not connection.connections
    return answered, has_ended


def _plain_headers(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Drop the headers of an offer to change the protocol."""
    changed = {b"upgrade", b"http2-settings", b"connection"}
    return [(name, value.strip(b" \t")) for name, value in headers if name not in changed]


def _plain_target(target: bytes) -> bytes:
    """Return path and query, without a scheme and host before them, and without a fragment."""
    path, _, query = _ADDRESS.sub(b"", target).partition(b"#")[0].partition(b"?")
    return path + (b"?" + query if query else b"")


def read_plainly(content: bytes) -> list[Request]:
    """Read requests with h11, up to the first that it refuses."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADER_BYTES)
    connection.receive_data(content)
    requests: list[Request] = []
    while True:
        head, body = None, b""
        try:
            while not isinstance(event := connection.next_event(), h11.EndOfMessage):
                if event in (h11.NEED_DATA, h11.PAUSED) or isinstance(event, h11.ConnectionClosed):
                    return requests
                if isinstance(event, h11.Data):
                    body += bytes(event.data)
                else:
                    head = event
        except h11.RemoteProtocolError:
            return requests
        if head.method == b"CONNECT" or head.http_version not in {b"1.0", b"1.1"}:
            return requests
        headers = [(bytes(name), bytes(value)) for name, value in head.headers]
        requests.append((head.method, _plain_target(head.target), _plain_headers(headers), body))
        connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
        connection.send(h11.EndOfMessage())
        if connection.our_state is not h11.DONE:
            return requests
        connection.start_next_cycle()


TARGETS = {"heads": Target(seeds, check)}
