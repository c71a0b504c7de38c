"""uvicorn's HTTP protocol, with the time limits that it lacks and a fix for h2c.

A connection is closed where its client does not complete headers for 10 seconds, and aborted where
it reads nothing of an answer for `response_timeout`; the time limit of a body is in
`middleware/memory.py`, where it gets an answer. An offer to upgrade, such as to h2c, is taken out
of a request, because the parser would skip its body. More than 64 KiB of headers get 431, more than
100 requests sent ahead 400, and a close lets a client that still sends read its answer; what else
floods a connection is left to a proxy.

The names that this overrides are no public interface of uvicorn's: the tests fail where a release
renames one.
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
    """The protocol with its parameter, as uvicorn's `http` option takes it."""
    parameters = {"response_timeout": response_timeout, "log": SampledLog()}
    return type("Connection", (BoundedConnection,), parameters)


class BoundedConnection(HttpToolsProtocol):
    """A connection whose client may keep it waiting for a limited time."""

    response_timeout: float
    log: SampledLog

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        self._plain, self._lingering = transport, LingeringTransport(transport)
        super().connection_made(cast("asyncio.Transport", self._lingering))
        self._waits_for_headers = True
        self._in_headers = self._is_rejected = False
        # Since a part of a body, or the end of headers or of a message.
        self._bytes_since_event = 0
        self._headers_seconds = self._unread_seconds = self._unread_bytes = 0

    def tick(self) -> None:
        """Count a second of waiting for the client; end the connection where it waits too long.

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
        """Parse what arrived; after an error it is dropped, so that the client can read of it."""
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
        """A request begins."""
        super().on_message_begin()
        self.scope["state"]["is_closing"] = self._lingering.is_closing
        self._in_headers = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; trailers, which come after the body, never become headers."""
        if self._in_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin the request, or queue it behind the one in work."""
        if self.parser.should_upgrade():
            return  # They are parsed again, without the upgrade.
        size = len(self.url) + sum([len(name) + len(value) for name, value in self.headers])
        if size > MAX_HEADER_BYTES or len(self.pipeline) >= MAX_PIPELINED_REQUESTS:
            self._bytes_since_event = size
            raise ValueError  # Ends the parser.
        self._in_headers = self._waits_for_headers = False
        self._headers_seconds = self._bytes_since_event = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body has arrived."""
        self._bytes_since_event = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The whole request has arrived."""
        if not self.parser.should_upgrade():
            self._bytes_since_event = 0
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """What is left of the request, or has begun of the next, has the time of headers."""
        super().on_response_complete()
        if self._is_idle():
            self._waits_for_headers = self.cycle.more_body or self._in_headers

    def shutdown(self) -> None:
        """Close now, or with the last response; uvicorn calls this when it closes the port."""
        super().shutdown()
        if self._is_idle():
            self._plain.close()

    def _is_idle(self) -> bool:
        """Whether every request so far has its response."""
        return self.cycle is None or self.cycle.response_complete

    def _head_without_upgrade(self) -> bytes:
        """The head of this request for a new parser, which goes on behind it."""
        method, version = self.parser.get_method(), self.parser.get_http_version()
        if method == b"CONNECT":
            raise httptools.HttpParserError
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        lines = [b"%b %b HTTP/%b" % (method, self.url, version.encode())]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"\r\n"])

    def _reject(self, status: HTTPStatus, code: str, detail: str) -> None:
        """Send an error and close; where requests before it are in work, close after them."""
        self.log.warning(code, client=self.client and self.client[0])
        self._is_rejected = True
        if not self._is_idle():
            if not self.cycle.more_body:
                self.cycle.keep_alive = False
                return
            # It is the newest request's own body.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self._is_idle() or not (self.cycle.response_started or self.pipeline):
            self.transport.write(render_error(status, code, detail))
            self.transport.close()
        else:
            self._plain.abort()


class LingeringTransport:
    """A transport whose `close` sends the end of file, and reads on until the client closes.

    A socket that is closed while unread data lies in it resets the connection, and the client's
    system then discards the response that the client has not read yet.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.has_sent_eof = False

    def __getattr__(self, name: str) -> Any:
        """What is that of the transport, such as `get_extra_info`."""
        return getattr(self._transport, name)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send `data`, unless the connection is being closed."""
        if not self.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """Send what is written, then the end of file."""
        if not self.is_closing():
            self.has_sent_eof = True
            with suppress(OSError):  # The client may have closed already.
                self._transport.write_eof()
            self._transport.resume_reading()

    def is_closing(self) -> bool:
        """Whether nothing more can be written."""
        return self.has_sent_eof or bool(self._transport.is_closing())


def render_error(status: HTTPStatus, code: str, detail: str) -> bytes:
    """A whole response with the usual error body; it announces that the connection closes."""
    request_id = uuid.uuid4().hex
    body = orjson.dumps({"detail": detail, "code": code, "request_id": request_id})
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nx-request-id: {request_id}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
