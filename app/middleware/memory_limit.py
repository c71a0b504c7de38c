"""Bounds the memory that clients hold: bodies that arrive and answers that wait to be taken."""

from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.access.client_key import client_key
from app.middleware.held_bytes import HeldAnswers, HeldBodies, Holding
from app.middleware.timed_body import TimedBody
from app.observability.logs import SampledLog

BODY_SECONDS = 10.0


class LimitMemory:
    """Holds at most about `max_bytes` of bodies, and as much of answers.

    What is too much hits who caused it: a client's large bodies are refused (503) while it holds
    more than its part, a body that stalls is 408, and who does not take his answer loses it.
    Requests without a body, such as those to /health, are never refused. A body must get on within
    each `body_seconds`.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, body_seconds: float = BODY_SECONDS) -> None:
        self.app = app
        self.bodies = HeldBodies(max_bytes)
        self.answers = HeldAnswers(max_bytes)
        self.body_seconds = body_seconds
        self.log = SampledLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count what this request holds, and let go of it at its end."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = _Exchange(self, scope, receive, send)
        try:
            await self.app(scope, exchange.receive, exchange.send)
        finally:
            exchange.release()


class _Exchange:
    """One request: it holds its body until its answer begins, and then what is left of that."""

    def __init__(self, limit: LimitMemory, scope: Scope, receive: Receive, send: Send) -> None:
        self._bodies, self._answers, self._log = limit.bodies, limit.answers, limit.log
        self._send = send
        self._body = TimedBody(receive, limit.body_seconds)
        # Only our own connections can be aborted; other servers have limits of their own.
        self._abort: Callable[[], None] | None = scope["state"].get("abort_connection")
        client = client_key(scope)
        self._upload = Holding(client, self._body.end)
        self._delivery = Holding(client, self._lose_answer if self._abort else None)

    async def receive(self) -> Message:
        """A part of the body, as far as there is room for it."""
        message = await self._body.receive()
        size = len(message.get("body", b""))
        if size:
            self._bodies.take(self._upload, size)
        if self._body.complete:
            self._upload.give_way = None
        return message

    async def send(self, message: Message) -> None:
        """A part of the answer; whatever holds the body has let go of it."""
        if message["type"] == "http.response.start":
            self._bodies.release(self._upload)
            length = int(Headers(raw=message["headers"]).get("content-length", "0"))
            self._answers.add(self._delivery, length)
        await self._send(message)
        self._answers.hand_over(self._delivery, len(message.get("body", b"")))

    def release(self) -> None:
        """Hold nothing any more."""
        self._bodies.release(self._upload)
        self._answers.release(self._delivery)

    def _lose_answer(self) -> None:
        self._log.warning("answer_not_taken", reason="unread answers fill the memory")
        if self._abort:
            self._abort()
