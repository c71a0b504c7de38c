"""uvicorn's HTTP protocol, with the time limits that it lacks and a fix for h2c.

A connection is closed if its client does not complete headers within 10 seconds, and aborted if
the client reads nothing of a response for `response_timeout` seconds. `middleware/limits.py` limits
the time of a body and sends an error. More than 64 KiB of headers get 431, more than 100 pipelined
requests 400. An offer to upgrade, such as to h2c, is removed from the request, because the parser
would skip its body. A closing connection still reads, so that a client that is sending can read the
response. Other floods of a connection are left to a proxy.

The overridden methods are not a public interface of uvicorn; the tests fail if a release renames
one.
"""

import asyncio
import uuid
from contextlib import suppress
from http import HTTPStatus
from typing import Any, cast

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.logs import SampledLog

HEADERS_TIMEOUT = 10
MAX_HEADER_BYTES = 65_536
MAX_PIPELINED_REQUESTS = 100


def bounded_connection(response_timeout: float) -> "type[BoundedConnection]":
    """Create the protocol class for uvicorn's `http` option."""
    parameters = {"response_timeout": response_timeout, "log": SampledLog()}
    return type("Connection", (BoundedConnection,), parameters)


class BoundedConnection(HttpToolsProtocol):
    """A connection that waits for its client for a limited time."""

    response_timeout: float
    log: SampledLog

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        self._plain, self._lingering = transport, LingeringTransport(transport)
        super().connection_made(cast("asyncio.Transport", self._lingering))
        self._waits_for_headers = True
        self._in_headers = self._is_rejected = False
        # Counted since the last part of a body, or end of headers or of a message.
        self._bytes_since_event = 0
        self._headers_seconds = self._unread_seconds = self._unread_bytes = 0

    def tick(self) -> None:
        """Count a second of waiting for the client; end the connection after its time limit.

        Seconds in which the process was stopped do not count.
        """
        is_waiting = self._waits_for_headers or self._lingering.has_sent_eof
        self._headers_seconds = self._headers_seconds + 1 if is_waiting else 0
        if self._headers_seconds > HEADERS_TIMEOUT:
            self._plain.close()
        unread, before = self.transport.get_write_buffer_size(), self._unread_bytes
        self._unread_seconds = self._unread_seconds + 1 if unread and unread == before else 0
        self._unread_bytes = unread
        if self._unread_seconds >= self.response_timeout:
            self.log.warning("answer_not_taken", seconds=self.response_timeout)
            self._plain.abort()

    def data_received(self, data: bytes) -> None:
        """Parse the data; after an error, drop it, so that the client can still read the error."""
        self._unset_keepalive_if_required()
        if self._is_rejected or self.transport.is_closing():
            return
        self._waits_for_headers |= self._is_idle()
        self._bytes_since_event += len(data)
        is_malformed = False
        try:
            while data:
                try:
                    self.parser.feed_data(data)
                    break
                except httptools.HttpParserUpgrade as upgrade:
                    data = self._head_without_upgrade() + data[upgrade.args[0] :]
        except httptools.HttpParserError:
            is_malformed = True
        if self._bytes_since_event > MAX_HEADER_BYTES:
            status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            detail = f"The headers are larger than {MAX_HEADER_BYTES} bytes."
            self._reject(status, "headers_too_large", detail)
        elif is_malformed:
            self._reject(HTTPStatus.BAD_REQUEST, "malformed_request", "This is not valid HTTP.")

    def on_message_begin(self) -> None:
        """Begin to read a request."""
        super().on_message_begin()
        self.scope["state"]["is_closing"] = self._lingering.is_closing
        self._in_headers = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header; ignore trailers, which come after the body."""
        if self._in_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin the request, or queue it behind the one in work."""
        if self.parser.should_upgrade():
            return  # `data_received` has the head parsed again, without the upgrade.
        size = len(self.url) + sum([len(name) + len(value) for name, value in self.headers])
        if size > MAX_HEADER_BYTES or len(self.pipeline) >= MAX_PIPELINED_REQUESTS:
            self._bytes_since_event = size
            raise ValueError  # Stops the parser.
        self._in_headers = self._waits_for_headers = False
        self._headers_seconds = self._bytes_since_event = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Receive a part of the body."""
        self._bytes_since_event = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Receive the end of the request."""
        if not self.parser.should_upgrade():
            self._bytes_since_event = 0
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Limit the time of the rest of this request, or of the headers of the next."""
        super().on_response_complete()
        if self._is_idle():
            self._waits_for_headers = self.cycle.more_body or self._in_headers

    def shutdown(self) -> None:
        """Close now, or after the last response; uvicorn calls this when it closes the port."""
        super().shutdown()
        if self._is_idle():
            self._plain.close()

    def _is_idle(self) -> bool:
        """Whether every request so far has its response."""
        return self.cycle is None or self.cycle.response_complete

    def _head_without_upgrade(self) -> bytes:
        """Render the head of this request again, for a new parser that replaces the present one."""
        method, version = self.parser.get_method(), self.parser.get_http_version()
        if method == b"CONNECT":
            raise httptools.HttpParserError
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        lines = [b"%b %b HTTP/%b" % (method, self.url, version.encode())]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"\r\n"])

    def _reject(self, status: HTTPStatus, code: str, detail: str) -> None:
        """Send an error and close, after the responses to earlier requests."""
        self.log.warning(code, client=self.client and self.client[0])
        self._is_rejected = True
        if not self._is_idle():
            if not self.cycle.more_body:
                self.cycle.keep_alive = False
                return
            # The error is in the body of the request in work.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self._is_idle() or not (self.cycle.response_started or self.pipeline):
            self.transport.write(render_error(status, code, detail))
            self.transport.close()
        else:
            self._plain.abort()


class LingeringTransport:
    """A transport whose `close` sends the end of file, and reads on until the client closes.

    Closing a socket that holds unread data would reset the connection, and the client's system
    would discard the response that the client has not read yet.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.has_sent_eof = False

    def __getattr__(self, name: str) -> Any:
        """Take other attributes, such as `get_extra_info`, from the transport."""
        return getattr(self._transport, name)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send `data`, unless the connection is being closed."""
        if not self.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """Send the data written so far, then the end of file."""
        if not self.is_closing():
            self.has_sent_eof = True
            with suppress(OSError):  # The client may have closed already.
                self._transport.write_eof()
            self._transport.resume_reading()

    def is_closing(self) -> bool:
        """Whether nothing more can be written."""
        return self.has_sent_eof or bool(self._transport.is_closing())


def render_error(status: HTTPStatus, code: str, detail: str) -> bytes:
    """Render a whole response, with the usual error body and `Connection: close`."""
    request_id = uuid.uuid4().hex
    body = orjson.dumps({"detail": detail, "code": code, "request_id": request_id})
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nx-request-id: {request_id}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
