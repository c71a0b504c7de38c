"""Limits the memory of request bodies, and of answers from before they are made to their end.

A request waits for its client while its body arrives and while its response is read. When memory is
short, one that has waited for a second without progress is evicted. A request that the service
works on is never evicted.
"""

from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.context import context_of, is_stream
from app.middleware.body_timeout import TimedBody
from app.middleware.held_memory import BodyMemory, HeldAnswer, Reservation, ResponseMemory
from app.middleware.stream_memory import StreamedExchange
from app.observability.logs import SampledLog

BODY_SECONDS = 10.0


class LimitMemory:
    """Holds at most about `max_bytes` of request bodies, and `max_answers_bytes` of answers.

    A client that holds more than its share gets 503 for large bodies and answers, a stalled body
    gets 408, and a response that is not read is cut off. One answer may hold `answer_bytes`, and
    more where its body is large. Requests without a body, such as those to /health, are never
    refused. A body must make progress within each `body_seconds`; the body of a stream may
    pause for `stream_seconds`.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int,
        body_seconds: float = BODY_SECONDS,
        stream_seconds: float = BODY_SECONDS,
        *,
        answer_bytes: int,
        max_answers_bytes: int,
    ) -> None:
        self.app = app
        self.bodies = BodyMemory(max_bytes)
        self.responses = ResponseMemory(max_answers_bytes)
        self.answer_bytes = answer_bytes
        self.body_seconds = body_seconds
        self.stream_seconds = stream_seconds
        self.log = SampledLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count what this request holds, and release it at the end."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = self._exchange(scope, receive, send)
        try:
            await self.app(scope, exchange.receive, exchange.send)
        finally:
            exchange.release()

    def _exchange(
        self, scope: Scope, receive: Receive, send: Send
    ) -> "_Exchange | StreamedExchange":
        if not is_stream(scope):
            return _Exchange(self, scope, receive, send)
        return StreamedExchange(
            scope,
            receive,
            send,
            bodies=self.bodies,
            responses=self.responses,
            patience=self.stream_seconds,
            answer_bytes=self.answer_bytes,
        )


class _Exchange:
    """One request: it holds its body until its response begins, and its answer until it is sent."""

    def __init__(self, limit: LimitMemory, scope: Scope, receive: Receive, send: Send) -> None:
        self._bodies, self._log = limit.bodies, limit.log
        self._send = send
        self._body = TimedBody(receive, limit.body_seconds)
        # Only app.server's connections can be aborted; other servers have limits of their own.
        self._abort: Callable[[], None] | None = scope["state"].get("abort_connection")
        context = context_of(scope)
        self._held_body = Reservation(context.client, self._body.time_out)
        cut_off = self._cut_off if self._abort else None
        self._answer = HeldAnswer(limit.responses, context.client, limit.answer_bytes, cut_off)
        context.answer = self._answer

    async def receive(self) -> Message:
        """Receive a part of the body; raises `QueueFullError` if there is no room for it."""
        message = await self._body.receive()
        size = len(message.get("body", b""))
        if size:
            self._bodies.reserve(self._held_body, size)
            self._answer.body_bytes += size
        if self._body.complete:
            self._held_body.evict = None
        return message

    async def send(self, message: Message) -> None:
        """Send a part of the response; when it begins, the body is counted with it if at all."""
        if message["type"] == "http.response.start":
            self._bodies.release(self._held_body)
            length = Headers(raw=message["headers"]).get("content-length")
            self._answer.begin(None if length is None else int(length))
        await self._send(message)
        self._answer.sent(len(message.get("body", b"")))

    def release(self) -> None:
        """Hold nothing any more."""
        self._bodies.release(self._held_body)
        self._answer.release()

    def _cut_off(self) -> None:
        self._log.warning("answer_not_taken", reason="unread answers fill the memory")
        if self._abort:
            self._abort()
