"""The HTTP protocol of one connection: uvicorn's, with limits that it does not have.

Knows nothing of the app. The connection is closed, after a bounded time, on a client that never
completes its headers, sends too many bytes outside a body, goes on sending after its response, or
does not read its response. A request that is being processed is never cut off.

It overrides methods of uvicorn's that are no public interface. Where a release renames one of them,
the tests of connections fail.
"""

import asyncio
import errno
import os
import select
import uuid
from asyncio.events import AbstractEventLoop, TimerHandle
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from http import HTTPStatus
from typing import Any, cast

import httptools
import orjson
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from smart_embedder.observability.logs import SampledLog

HEADERS_TIMEOUT = 10.0
LINGER_TIMEOUT = 10.0
MAX_HEADER_BYTES = 65_536
# Of path and query: decoding 64 KiB of them takes 20 ms, and no client of the service needs more.
MAX_PATH_BYTES = 8192
MAX_PIPELINED_REQUESTS = 16
# What the parser calls back for in one turn: a millisecond of headers, or of chunks of one byte.
_EVENTS_OF_A_TURN = 1000
# Outside a body the parser gets small chunks, so that few requests complete within one of them.
_CHUNK_BYTES = 512
_GRACE_SECONDS = 0.1
_HANGUP_SECONDS = 0.5
_NO_DESCRIPTORS = {errno.EMFILE, errno.ENFILE}
_UPGRADE_HEADERS = {b"upgrade", b"http2-settings"}


def bounded_connection(
    response_timeout: float, is_draining: Callable[[], bool]
) -> "type[BoundedConnection]":
    """The protocol with its parameters, as uvicorn's `http` option takes it."""
    parameters = {
        "response_timeout": response_timeout,
        "is_draining": staticmethod(is_draining),
        "log": SampledLog(),
        "turns": ConnectionTurns(),
    }
    return type("Connection", (BoundedConnection,), parameters)


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's protocol with limits for headers, pipelined requests and unread responses.

    `response_timeout` is how many seconds a response may wait for the client to read it. While
    `is_draining`, the last response of a connection announces that it closes.
    """

    response_timeout: float
    is_draining: Callable[[], bool]
    log: SampledLog
    turns: "ConnectionTurns"

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request, for a limited time."""
        self._lingering = LingeringTransport(transport, self.loop)
        lingering = cast("asyncio.Transport", self._lingering)
        super().connection_made(lingering)
        self.flow = self._bounded_flow = BoundedFlowControl(lingering, self._can_read)
        self._timers: dict[Callable[[], None], TimerHandle] = {}
        self._active_cycle: RequestResponseCycle | None = None
        self._error_response: bytes | None = None
        self._read_buffer = bytearray()
        self._in_message = self._in_head = False
        self._bytes_outside_body = 0
        self._body_remaining = 0
        self._events = 0
        self._waits_for_turn = False
        self._warn_if_out_of_descriptors()
        self._start_headers_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop every timer, and drop what refers back to this connection."""
        for callback in [*self._timers]:
            self._stop_timer(callback)
        self._lingering.close_without_lingering()
        self._read_buffer.clear()
        self.pipeline.clear()
        if self._active_cycle is not None:
            self._active_cycle.disconnected = True
            self._active_cycle.message_event.set()
        super().connection_lost(exc)
        self._bounded_flow.detach()

    def data_received(self, data: bytes) -> None:
        """Parse what arrived, as far as the limit of pipelined requests allows."""
        self._unset_keepalive_if_required()
        if self._error_response is not None or self.transport.is_closing():
            return  # It is read and dropped, so that the client can read its response.
        if not self._in_message and self._is_idle():
            self._start_headers_timer()
        self._read_buffer += data
        self._parse_buffer()

    def on_message_begin(self) -> None:
        """A request begins: its headers must arrive in time."""
        super().on_message_begin()
        self.scope["state"]["abort_connection"] = self._lingering.abort
        self.scope["state"]["is_closing"] = self._lingering.is_closing
        self._in_message = self._in_head = True
        self._body_remaining = 0
        self._start_headers_timer()

    def on_url(self, url: bytes) -> None:
        """A part of path and query; a long path ends the parser."""
        super().on_url(url)
        if self._has_long_path():
            raise ValueError

    def _has_long_path(self) -> bool:
        return len(self.url) > MAX_PATH_BYTES and b"?" not in self.url[: MAX_PATH_BYTES + 1]

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; trailers, which come after the body, are not read and never become headers."""
        self._events += 1
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The headers are complete, so the client has read the response before."""
        if self.parser.should_upgrade():
            return  # They are parsed again, without the upgrade.
        self._in_head = False
        self._stop_timer(self._headers_overdue)
        self._stop_timer(self._lingering.close_without_lingering)
        self._bytes_outside_body = 0
        lengths = (int(value) for name, value in self.headers if name == b"content-length")
        self._body_remaining = next(lengths, 0)
        if not self.flow.write_paused:
            self._stop_timer(self._response_overdue)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body has arrived."""
        self._events += 1
        self._bytes_outside_body = 0
        self._body_remaining = max(0, self._body_remaining - len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The whole request has arrived."""
        if self.parser.should_upgrade():
            return
        self._in_message = False
        self._bytes_outside_body = 0
        self._stop_timer(self._lingering.close_without_lingering)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The response is written; the rest of its request is not read."""
        super().on_response_complete()
        self._lingering.flush()
        if self.transport.get_write_buffer_size():
            self._start_response_timer()
        if self.transport.is_closing():
            return
        if self._in_message and self._is_idle():
            self._start_timer(LINGER_TIMEOUT, self._lingering.close_without_lingering)
        self._parse_buffer()
        self._send_error_in_turn()

    def pause_writing(self) -> None:
        """The client reads its response more slowly than it is written."""
        super().pause_writing()
        self._start_response_timer()

    def resume_writing(self) -> None:
        """The client has read; the time of a stream, which may never end, begins anew."""
        super().resume_writing()
        if self._is_streaming():
            self._stop_timer(self._response_overdue)

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, unless a request has arrived meanwhile."""
        close = super().timeout_keep_alive_handler
        self.timeout_keep_alive_task = self.loop.call_later(_GRACE_SECONDS, close)

    def close_after_response(self) -> None:
        """Close with the response in work, if no request waits behind it."""
        if self._active_cycle is not None and not (self.pipeline or self._read_buffer):
            self._active_cycle.keep_alive = False

    def shutdown(self) -> None:
        """Close now, or with the last response; uvicorn calls this when it closes the port."""
        super().shutdown()
        if self._is_idle():
            self._lingering.close_without_lingering()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._active_cycle = cycle
        start = super()._start_asgi_task
        self.turns.begin(self._address, lambda: start(cycle, app))

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    def _is_idle(self) -> bool:
        """Whether every request so far has its response."""
        cycle = self._active_cycle
        return not self.pipeline and (cycle is None or cycle.response_complete)

    def _can_read(self) -> bool:
        """Whether everything that arrived is parsed and there is room for more."""
        if self._read_buffer or len(self.pipeline) >= MAX_PIPELINED_REQUESTS:
            return False
        return self._is_idle() or len(self.cycle.body) <= HIGH_WATER_LIMIT

    def _parse_buffer(self) -> None:
        """Feed the parser with what has arrived, until too many requests are pipelined.

        What takes longer than a turn is parsed in further ones: it may be 40,000 chunks of a byte.
        """
        if self._read_buffer:
            self._unset_keepalive_if_required()
        self._events = 0
        while self._read_buffer and len(self.pipeline) < MAX_PIPELINED_REQUESTS:
            if self._events >= _EVENTS_OF_A_TURN:
                if not self._waits_for_turn:
                    self._waits_for_turn = True
                    self.turns.wait(self._address, self._parse_further)
                break
            chunk = bytes(self._read_buffer[: self._body_remaining or _CHUNK_BYTES])
            del self._read_buffer[: len(chunk)]
            self._parse(chunk)
        if self.is_draining():
            self.close_after_response()
        if self._can_read():
            self.flow.resume_reading()
        else:
            self.flow.pause_reading()
            self._start_timer(_HANGUP_SECONDS, self._look_for_hangup)

    def _parse_further(self) -> None:
        self._waits_for_turn = False
        if self._read_buffer:  # Not cleared meanwhile, with the connection.
            self._parse_buffer()

    def _parse(self, chunk: bytes) -> None:
        self._bytes_outside_body += len(chunk)
        try:
            self.parser.feed_data(chunk)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(chunk[upgrade.args[0] :])
        except httptools.HttpParserError:
            if self._has_long_path():
                detail = f"The path is longer than {MAX_PATH_BYTES} bytes."
                self._reject(HTTPStatus.REQUEST_URI_TOO_LONG, "uri_too_long", detail)
                return
            self._reject(HTTPStatus.BAD_REQUEST, "malformed_request", "This is not valid HTTP.")
        else:
            if self._bytes_outside_body > MAX_HEADER_BYTES:
                status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
                detail = f"The headers are larger than {MAX_HEADER_BYTES} bytes."
                self._reject(status, "headers_too_large", detail)

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Parse the request again without its offer to upgrade, which the parser would accept."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._reject(HTTPStatus.BAD_REQUEST, "malformed_request", "This is no proxy.")
            return
        version = self.parser.get_http_version()
        head = head_without_upgrade(method, self.url, version, self.headers)
        self._read_buffer[:0] = head + rest
        self._bytes_outside_body = 0
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _look_for_hangup(self) -> None:
        """End a stream whose client has left; the loop does not notice it while reading pauses."""
        if not self.flow.read_paused or not self._is_streaming():
            return
        # Only Linux has this event.
        if has_event(self.transport.get_extra_info("socket"), "POLLRDHUP"):
            self._lingering.abort()
        else:
            self._start_timer(_HANGUP_SECONDS, self._look_for_hangup)

    def _reject(self, status: HTTPStatus, code: str, detail: str) -> None:
        """Parse no further; answer the requests before this one, then send the error and close."""
        self.log.warning(code, client=self.client and self.client[0])
        self._read_buffer.clear()
        self._error_response = error_response(status, code, detail)
        if self.pipeline and self.pipeline[0][0].more_body:
            self.pipeline.popleft()  # The newest: its body is what cannot be parsed.
        elif self._active_cycle is not None and self._active_cycle.more_body:
            self._active_cycle.disconnected = True
            self._active_cycle.message_event.set()
        self._send_error_in_turn()

    def _send_error_in_turn(self) -> None:
        cycle = self._active_cycle
        disconnected = cycle is not None and cycle.disconnected
        if self._error_response is None or not (self._is_idle() or disconnected):
            return
        if self._is_idle() or (cycle and not cycle.response_started):
            self.transport.write(self._error_response)
        self.transport.close()

    def _warn_if_out_of_descriptors(self) -> None:
        """Log a warning if this connection's descriptor cannot be copied.

        At the limit the event loop reports nothing: it accepts the next client and closes at once.
        """
        connection = self.transport.get_extra_info("socket")
        if connection is None:
            return
        try:
            os.close(os.dup(connection.fileno()))
        except OSError as error:
            if error.errno in _NO_DESCRIPTORS:
                self.log.warning(
                    "descriptor_limit_reached",
                    effect="further callers are disconnected",
                    remedy="raise the limit of open files (ulimit -n)",
                )

    def _start_headers_timer(self) -> None:
        self._start_timer(HEADERS_TIMEOUT, self._headers_overdue, _GRACE_SECONDS)

    def _headers_overdue(self) -> None:
        if self._is_idle():
            self._lingering.close_without_lingering()
        else:  # They belong to a pipelined request, while another one is in work.
            self._start_headers_timer()

    def _is_streaming(self) -> bool:
        """Whether the response in work has no length; its app ends it well before the limit."""
        return self._active_cycle is not None and bool(self._active_cycle.chunked_encoding)

    def _start_response_timer(self) -> None:
        patience = self.response_timeout * (2 if self._is_streaming() else 1)
        self._start_timer(patience, self._response_overdue)

    def _response_overdue(self) -> None:
        if self.transport.get_write_buffer_size():
            self.log.warning("answer_not_taken", seconds=self.response_timeout)
            self._lingering.abort()

    def _start_timer(
        self, seconds: float, callback: Callable[[], None], grace: float = 0.0
    ) -> None:
        """Call `callback` after `seconds`; starting it again while it runs changes nothing.

        A process that was stopped finds its timers overdue before it has read what arrived
        meanwhile; `grace` seconds of running time let it read first.
        """
        if callback not in self._timers:
            self._timers[callback] = self.loop.call_later(seconds, self._expire, callback, grace)

    def _stop_timer(self, callback: Callable[[], None]) -> None:
        if callback in self._timers:
            self._timers.pop(callback).cancel()

    def _expire(self, callback: Callable[[], None], grace: float) -> None:
        del self._timers[callback]
        if grace:
            self._start_timer(grace, callback)
        else:
            callback()


class ConnectionTurns:
    """Turns of connections, in which one begins a request, or parses further where that takes long.

    Between two turns the loop runs everything else once. Turns go round among the clients'
    addresses, so that a client with many connections holds up another by one turn.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Callable[[], None]]] = {}
        self._taken = False

    def begin(self, client: str, call: Callable[[], None]) -> None:
        """Call at once, if nobody has had a turn since the loop ran everything else."""
        if self._taken:
            self.wait(client, call)
        else:
            self._take(call)

    def wait(self, client: str, call: Callable[[], None]) -> None:
        """Call when the turn of `client` comes; it may wait again."""
        self._waiting.setdefault(client, deque()).append(call)
        if not self._taken:
            self._take(lambda: None)

    def _take(self, call: Callable[[], None]) -> None:
        self._taken = True
        asyncio.get_running_loop().call_soon(self._next)
        call()

    def _next(self) -> None:
        self._taken = False
        if self._waiting:
            client = next(iter(self._waiting))
            calls = self._waiting.pop(client)
            call = calls.popleft()
            if calls:  # Behind all others.
                self._waiting[client] = calls
            self._take(call)


class LingeringTransport:
    """A transport with a lingering `close`, which sends the head of a response with what follows.

    So whoever reads a small response is woken once.

    A socket that is closed while unread data lies in it resets the connection, and the client's
    system then discards the response that the client has not read yet. So only the sending side is
    shut down first, and what still arrives is dropped until the client closes or a timeout.
    """

    def __init__(self, transport: asyncio.Transport, loop: AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._linger_timer: TimerHandle | None = None
        self._head: bytes | None = None

    def __getattr__(self, name: str) -> Any:
        """What is that of the transport, such as `abort`."""
        return getattr(self._transport, name)

    def close(self) -> None:
        """Send what is written, then end of file; read on until the client closes or a timeout."""
        if self.is_closing():
            return
        self.flush()
        self._linger_timer = self._loop.call_later(LINGER_TIMEOUT, self.close_without_lingering)
        with suppress(OSError):  # The client may have closed already.
            self._transport.write_eof()
        self._transport.resume_reading()

    def close_without_lingering(self) -> None:
        """Send what is written and close, whatever the client still sends."""
        self.flush()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        self._transport.close()

    def is_closing(self) -> bool:
        """Whether nothing more can be written."""
        return self._linger_timer is not None or self._transport.is_closing()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send `data`, unless the connection is being closed; a head waits for the loop to turn."""
        if self._linger_timer is not None:
            return
        if self._head is not None:
            head, self._head = self._head, None
            self._transport.writelines([head, data])
        elif data[:5] == b"HTTP/":  # Or a body that looks like it.
            self._head = bytes(data)
            self._loop.call_soon(self.flush)
        else:
            self._transport.write(data)

    def flush(self) -> None:
        """Send a head that waits."""
        head, self._head = self._head, None
        if head is not None and not self.is_closing():
            self._transport.write(head)

    def pause_reading(self) -> None:
        """Leave what arrives in the system's buffer, whose size then stops the client."""
        if self._linger_timer is None:
            self._transport.pause_reading()


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


def has_event(connection: Any, event: str) -> bool:
    """Whether a socket, or its descriptor, has this event of `select.poll` now; nothing is read.

    False on systems that cannot tell.
    """
    if connection is None or not hasattr(select, event):
        return False
    poll = select.poll()
    poll.register(connection, getattr(select, event))
    return bool(poll.poll(0))


def error_response(status: HTTPStatus, code: str, detail: str) -> bytes:
    """A whole response with the usual error body; it announces that the connection closes."""
    request_id = uuid.uuid4().hex
    body = orjson.dumps({"detail": detail, "code": code, "request_id": request_id})
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nx-request-id: {request_id}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


def head_without_upgrade(
    method: bytes, target: bytes, version: str, headers: Iterable[tuple[bytes, bytes]]
) -> bytes:
    """The head of a request without the client's offer to change the protocol."""
    lines = [b"%b %b HTTP/%b" % (method, target, version.encode())]
    for name, value in headers:
        kept = value
        if name == b"connection":
            tokens = (token.strip() for token in value.split(b","))
            kept = b", ".join(token for token in tokens if token.lower() not in _UPGRADE_HEADERS)
        if name not in _UPGRADE_HEADERS and (kept or not value):
            lines.append(b"%b: %b" % (name, kept))
    return b"\r\n".join([*lines, b"\r\n"])
