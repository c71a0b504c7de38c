"""What a client may do with a connection: the limits that uvicorn's own protocol leaves open.

Knows nothing of the app. A client that never completes its headers, sends more outside a body than
any client needs, goes on sending after its answer, or does not take its answer loses its connection
after a bounded time. A request in work is never cut off, and one that has arrived is answered.
"""

import asyncio
from asyncio.events import TimerHandle
from collections.abc import Callable
from http import HTTPStatus

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from app.observability.sampled_log import SampledLog
from app.server.descriptors import descriptors_used_up
from app.server.drain import Drain
from app.server.lingering import LINGER_TIMEOUT, LingeringTransport
from app.server.raw_http import content_length, head_without_upgrade, refusal

HEADERS_TIMEOUT = 10.0
MAX_HEADER_BYTES = 65_536
MAX_WAITING_REQUESTS = 16

# Outside a body the parser is fed so little at a time that few requests complete within a piece.
_PIECE_BYTES = 512
# A process that was stopped finds its timers overdue before it has read what arrived meanwhile.
_LAST_LOOK = 0.1


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's protocol with limits for headers, for requests that wait, and for unread answers.

    `answer_timeout` is the most seconds that an answer may wait for the client to take it. Once
    `drain` has begun, the last answer of a connection tells that it ends.
    """

    answer_timeout: float
    drain: Drain
    log: SampledLog

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request, but not for ever."""
        self._lingering = LingeringTransport(transport, self.loop)
        super().connection_made(self._lingering)
        self.flow = self._flow = _Flow(self._lingering, self._may_read)
        self._headers_timer: TimerHandle | None = None
        self._body_timer: TimerHandle | None = None
        self._answer_timer: TimerHandle | None = None
        self._running: RequestResponseCycle | None = None
        self._refusal: bytes | None = None
        self._unparsed = bytearray()
        self._in_message = False
        self._not_body = 0
        self._body_left = 0
        self._watch_descriptors()
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop every timer, and let go of what refers back here."""
        for timer in (self._headers_timer, self._body_timer, self._answer_timer):
            _cancel(timer)
        self._lingering.end()
        self._unparsed.clear()
        self.pipeline.clear()
        if self._running is not None:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)
        self._flow.may_read = _never

    def data_received(self, data: bytes) -> None:
        """Parse what arrived, as far as there is room for requests that wait."""
        self._unset_keepalive_if_required()
        if self._refusal is not None or self.transport.is_closing():
            return  # It is read so that the client can read, too.
        if not self._in_message and self._idle():
            self._expect_headers()
        self._unparsed += data
        self._parse()

    def on_message_begin(self) -> None:
        """A request begins: its headers must be there in time."""
        super().on_message_begin()
        self.scope["state"]["abort_connection"] = self._lingering.abort
        self._in_message = True
        self._body_left = 0
        self._expect_headers()

    def on_headers_complete(self) -> None:
        """The headers are there; who asks again has taken the answer before."""
        if self.parser.should_upgrade():
            return  # They come again, without the upgrade.
        _cancel(self._headers_timer)
        _cancel(self._body_timer)
        self._headers_timer = None
        self._not_body = 0
        self._body_left = content_length(self.headers)
        if not self.flow.write_paused:
            _cancel(self._answer_timer)
            self._answer_timer = None
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body is there."""
        self._not_body = 0
        self._body_left = max(0, self._body_left - len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The whole request is there."""
        if self.parser.should_upgrade():
            return
        self._in_message = False
        self._not_body = 0
        _cancel(self._body_timer)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """All is sent, if not yet taken. Nobody reads what may still come of this request."""
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._expect_to_be_read()
        if self.transport.is_closing():
            return
        if self._in_message and self._idle():
            self._body_timer = self.loop.call_later(LINGER_TIMEOUT, self._lingering.end)
        self._parse()
        self._refuse_in_turn()

    def pause_writing(self) -> None:
        """The client takes its answer more slowly than it is sent."""
        super().pause_writing()
        self._expect_to_be_read()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, unless a request lies there that was not yet read."""
        close = super().timeout_keep_alive_handler
        self.timeout_keep_alive_task = self.loop.call_later(_LAST_LOOK, close)

    def end_after_answer(self) -> None:
        """Let the answer of what is in work be the last one, where nothing waits behind it."""
        if self._running is not None and not (self.pipeline or self._unparsed):
            self._running.keep_alive = False

    def shutdown(self) -> None:
        """Close now, or with the last answer; called when the port is closed."""
        super().shutdown()
        if self._idle():
            self._lingering.end()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _idle(self) -> bool:
        """Whether every request so far is answered."""
        return not self.pipeline and (self._running is None or self._running.response_complete)

    def _may_read(self) -> bool:
        """Whether what arrived has found its place, so that more can be taken."""
        if self._unparsed or len(self.pipeline) >= MAX_WAITING_REQUESTS:
            return False
        return self._idle() or len(self.cycle.body) <= HIGH_WATER_LIMIT

    def _parse(self) -> None:
        """Feed the parser with what arrived, until enough requests wait."""
        if self._unparsed:
            self._unset_keepalive_if_required()
        while self._unparsed and len(self.pipeline) < MAX_WAITING_REQUESTS:
            piece = bytes(self._unparsed[: self._body_left or _PIECE_BYTES])
            del self._unparsed[: len(piece)]
            self._feed(piece)
        if self.drain.begun:
            self.end_after_answer()
        if self._may_read():
            self.flow.resume_reading()
        else:
            self.flow.pause_reading()

    def _feed(self, piece: bytes) -> None:
        self._not_body += len(piece)
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(piece[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(HTTPStatus.BAD_REQUEST, "malformed_request", "This is not valid HTTP.")
        else:
            if self._not_body > MAX_HEADER_BYTES:
                self._refuse_headers()

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Read the request again as if it offered no other protocol; the parser skips its body."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(HTTPStatus.BAD_REQUEST, "malformed_request", "This is no proxy.")
            return
        version = self.parser.get_http_version()
        head = head_without_upgrade(method, self.url, version, self.headers)
        self._unparsed[:0] = head + rest
        self._not_body = 0
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _refuse_headers(self) -> None:
        detail = f"The headers are larger than {MAX_HEADER_BYTES} bytes."
        self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "headers_too_large", detail)

    def _refuse(self, status: HTTPStatus, code: str, detail: str) -> None:
        """Read no further, answer the requests before this one, then refuse it."""
        self.log.warning(code, client=self.client and self.client[0])
        self._unparsed.clear()
        self._refusal = refusal(status, code, detail)
        if self.pipeline and self.pipeline[0][0].more_body:
            self.pipeline.popleft()  # The newest: its body is what cannot be read.
        elif self._running is not None and self._running.more_body:
            self._running.disconnected = True
            self._running.message_event.set()
        self._refuse_in_turn()

    def _refuse_in_turn(self) -> None:
        if self._refusal is None or not (self._idle() or self._running_is_lost()):
            return
        if self._idle() or (self._running and not self._running.response_started):
            self.transport.write(self._refusal)
        self.transport.close()

    def _running_is_lost(self) -> bool:
        return self._running is not None and self._running.disconnected

    def _watch_descriptors(self) -> None:
        connection = self.transport.get_extra_info("socket")
        if connection is not None and descriptors_used_up(connection.fileno()):
            self.log.warning(
                "descriptor_limit_reached",
                effect="further callers are disconnected",
                remedy="raise the limit of open files (ulimit -n)",
            )

    def _expect_headers(self) -> None:
        if self._headers_timer is None:
            self._headers_timer = self.loop.call_later(HEADERS_TIMEOUT, self._headers_overdue)

    def _headers_overdue(self) -> None:
        self._headers_timer = self.loop.call_later(_LAST_LOOK, self._headers_missing)

    def _headers_missing(self) -> None:
        self._headers_timer = None
        if self._idle():
            self._lingering.end()
        else:  # They belong to a request sent ahead, while another one is in work.
            self._expect_headers()

    def _expect_to_be_read(self) -> None:
        if self._answer_timer is None:
            self._answer_timer = self.loop.call_later(self.answer_timeout, self._answer_overdue)

    def _answer_overdue(self) -> None:
        self._answer_timer = None
        if self.transport.get_write_buffer_size():
            self.log.warning("answer_not_taken", seconds=self.answer_timeout)
            self._lingering.abort()


class _Flow(FlowControl):
    """uvicorn's flow control, which resumes reading whenever a request is answered or awaited."""

    def __init__(self, transport: asyncio.Transport, may_read: Callable[[], bool]) -> None:
        super().__init__(transport)
        self.may_read = may_read

    def resume_reading(self) -> None:
        """Read again, where there is room for what comes."""
        if self.may_read():
            super().resume_reading()


def bounded_connection(answer_timeout: float, drain: Drain) -> type[BoundedConnection]:
    """The protocol with what it needs to know, as uvicorn's `http` option takes it."""
    facts = {"answer_timeout": answer_timeout, "drain": drain, "log": SampledLog()}
    return type("Connection", (BoundedConnection,), facts)


def _never() -> bool:
    return False


def _cancel(timer: TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
