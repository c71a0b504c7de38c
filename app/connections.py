"""What a client may do with a connection: the limits that uvicorn's own protocol leaves open.

Knows nothing of the app. A client that never completes its headers, sends more outside a body than
any client needs, goes on sending after its answer, or does not take its answer loses its connection
after a bounded time. A request in work is never cut off.
"""

import asyncio
from asyncio.events import TimerHandle

import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

log = structlog.get_logger(__name__)

HEADERS_TIMEOUT = 10.0
LINGER_TIMEOUT = 10.0
MAX_HEADER_BYTES = 65_536

_HEADERS_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's protocol with limits for the time and size of headers, and for unread answers.

    `answer_timeout` is the most seconds that an answer may wait for the client to take it.
    """

    answer_timeout: float

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request, but not for ever."""
        super().connection_made(transport)
        self._headers_timer: TimerHandle | None = None
        self._linger_timer: TimerHandle | None = None
        self._answer_timer: TimerHandle | None = None
        self._in_message = False
        self._not_body = 0
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop every timer."""
        for timer in (self._headers_timer, self._linger_timer, self._answer_timer):
            _cancel(timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what arrived; what never becomes part of a body must stay small."""
        if not self._in_message and self._idle():
            self._expect_headers()
        self._not_body += len(data)
        super().data_received(data)
        if self._not_body > MAX_HEADER_BYTES and not self.transport.is_closing():
            log.warning("headers_too_large", most_bytes=MAX_HEADER_BYTES)
            self.transport.write(_HEADERS_TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        """A request begins: its headers must be there in time."""
        super().on_message_begin()
        self._in_message = True
        self._expect_headers()

    def on_headers_complete(self) -> None:
        """The headers are there; who asks again has taken the answer before."""
        _cancel(self._headers_timer)
        self._headers_timer = None
        self._not_body = 0
        if not self.flow.write_paused:
            _cancel(self._answer_timer)
            self._answer_timer = None
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body is there."""
        self._not_body = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The whole request is there."""
        self._in_message = False
        self._not_body = 0
        _cancel(self._linger_timer)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """All is sent, if not yet taken. Nobody reads what may still come of this request."""
        super().on_response_complete()
        if self._in_message and self._idle():
            self._linger_timer = self.loop.call_later(LINGER_TIMEOUT, self.transport.close)
        if self.transport.get_write_buffer_size():
            self._expect_to_be_read()

    def pause_writing(self) -> None:
        """The client takes its answer more slowly than it is sent."""
        super().pause_writing()
        self._expect_to_be_read()

    def _idle(self) -> bool:
        """Whether every request so far is answered."""
        return self.cycle is None or self.cycle.response_complete

    def _expect_headers(self) -> None:
        if self._headers_timer is None:
            self._headers_timer = self.loop.call_later(HEADERS_TIMEOUT, self._headers_overdue)

    def _headers_overdue(self) -> None:
        self._headers_timer = None
        if self._idle():
            self.transport.close()
        else:  # They belong to a request sent ahead, while another one is in work.
            self._expect_headers()

    def _expect_to_be_read(self) -> None:
        if self._answer_timer is None:
            self._answer_timer = self.loop.call_later(self.answer_timeout, self._answer_overdue)

    def _answer_overdue(self) -> None:
        self._answer_timer = None
        if self.transport.get_write_buffer_size():
            log.warning("answer_not_taken", seconds=self.answer_timeout)
            self.transport.abort()


def bounded_connection(answer_timeout: float) -> type[BoundedConnection]:
    """The protocol with its limit for unread answers, as uvicorn's `http` option takes it."""
    return type("Connection", (BoundedConnection,), {"answer_timeout": answer_timeout})


def _cancel(timer: TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
