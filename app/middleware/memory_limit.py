"""Bounds the memory that clients hold: request bodies, and responses that wait to be read.

A request that waits for its client, for more of its body or for the response to be read, and has
made no progress for a second, is evicted when memory is short. A request that the service itself
works on never is.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.context import context_of
from app.errors import QueueFullError
from app.middleware.body_timeout import TimedBody
from app.observability.logs import SampledLog

BODY_SECONDS = 10.0
STALLED_SECONDS = 1.0
# Fewer bytes than this in a second count as no progress where memory is short.
_PROGRESS_BYTES = 16_384
_SMALL_BODY = 65_536
_SHARE_OF_FREE = 3


class LimitMemory:
    """Holds at most about `max_bytes` of request bodies, and as much of responses.

    The limit hits who causes it: a client's large bodies get 503 while it holds more than its
    share, a body that stalls 408, and a response that is not read is cut off. Requests without a
    body, such as those to /health, are never refused. A body must make progress within each
    `body_seconds`.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, body_seconds: float = BODY_SECONDS) -> None:
        self.app = app
        self.bodies = BodyMemory(max_bytes)
        self.responses = ResponseMemory(max_bytes)
        self.body_seconds = body_seconds
        self.log = SampledLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count what this request holds, and release it at the end."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = _Exchange(self, scope, receive, send)
        try:
            await self.app(scope, exchange.receive, exchange.send)
        finally:
            exchange.release()


class _Exchange:
    """One request: it holds its body until its response begins, and then the unsent response."""

    def __init__(self, limit: LimitMemory, scope: Scope, receive: Receive, send: Send) -> None:
        self._bodies, self._responses, self._log = limit.bodies, limit.responses, limit.log
        self._send = send
        self._body = TimedBody(receive, limit.body_seconds)
        # Only app.server's connections can be aborted; other servers have limits of their own.
        self._abort: Callable[[], None] | None = scope["state"].get("abort_connection")
        client = context_of(scope).client
        self._held_body = Reservation(client, self._body.time_out)
        self._held_response = Reservation(client, self._cut_off if self._abort else None)

    async def receive(self) -> Message:
        """A part of the body, if there is room for it."""
        message = await self._body.receive()
        size = len(message.get("body", b""))
        if size:
            self._bodies.reserve(self._held_body, size)
        if self._body.complete:
            self._held_body.evict = None
        return message

    async def send(self, message: Message) -> None:
        """A part of the response; nothing refers to the body any more when it begins."""
        if message["type"] == "http.response.start":
            self._bodies.release(self._held_body)
            length = int(Headers(raw=message["headers"]).get("content-length", "0"))
            self._responses.reserve(self._held_response, length)
        await self._send(message)
        self._responses.release_sent(self._held_response, len(message.get("body", b"")))

    def release(self) -> None:
        """Hold nothing any more."""
        self._bodies.release(self._held_body)
        self._responses.release(self._held_response)
        self._held_response.evict = None  # It refers back here, a cycle.

    def _cut_off(self) -> None:
        self._log.warning("answer_not_taken", reason="unread answers fill the memory")
        if self._abort:
            self._abort()


@dataclass(eq=False, slots=True)
class Reservation:
    """The bytes that one request holds; `evict` ends it, and is None while the service works."""

    client: str
    evict: Callable[[], None] | None
    size: int = 0
    progress_at: float = 0.0
    bytes_since: int = 0

    def record_progress(self, size: int, now: float) -> None:
        """Record that the client has sent, or read, `size` bytes."""
        self.bytes_since += size
        if self.bytes_since >= _PROGRESS_BYTES:
            self.progress_at, self.bytes_since = now, 0


class Memory:
    """The bytes that all requests hold of one kind, at most about `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._total = 0
        self._by_client: Counter[str] = Counter()
        self._reservations: set[Reservation] = set()

    def release(self, reservation: Reservation) -> None:
        """Release all of it."""
        if reservation in self._reservations:
            self._reservations.remove(reservation)
            self._change(reservation, -reservation.size)

    def _add(self, reservation: Reservation, size: int, now: float) -> None:
        if reservation not in self._reservations:
            self._reservations.add(reservation)
            reservation.progress_at = now
        self._change(reservation, size)

    def _change(self, reservation: Reservation, size: int) -> None:
        reservation.size += size
        self._total += size
        self._by_client[reservation.client] += size
        if not self._by_client[reservation.client]:
            del self._by_client[reservation.client]

    def _evict_stalled(self, now: float, client: str | None = None) -> bool:
        """Evict one stalled request, of `client` or else of the client that holds most.

        The one that has made no progress for longest; False where none is stalled.
        """
        stalled = [
            each
            for each in self._reservations
            if each.evict and now - each.progress_at >= STALLED_SECONDS
            if client is None or each.client == client
        ]
        if not stalled:
            return False
        worst = max(stalled, key=lambda each: (self._by_client[each.client], -each.progress_at))
        self.release(worst)
        if worst.evict:
            worst.evict()
        return True


class BodyMemory(Memory):
    """Request bodies that arrive or are worked on.

    A client may hold three times what it leaves free: three quarters where it is alone, so that no
    client can fill the memory. A small body is refused only where there is no room at all.
    """

    def reserve(self, reservation: Reservation, size: int) -> None:
        """Hold `size` bytes more of a body; raise `QueueFullError` where there is no room."""
        now = asyncio.get_running_loop().time()
        while not self._fits(reservation, size):
            client = None if self._total + size > self.max_bytes else reservation.client
            if not self._evict_stalled(now, client):
                raise QueueFullError(self._refusal(reservation), retry_after=1)
        self._add(reservation, size, now)
        reservation.record_progress(size, now)

    def _fits(self, reservation: Reservation, size: int) -> bool:
        free = self.max_bytes - self._total - size
        if free < 0:
            return False
        own = self._by_client[reservation.client] + size
        return reservation.size + size <= _SMALL_BODY or own <= _SHARE_OF_FREE * free

    def _refusal(self, reservation: Reservation) -> str:
        return (
            f"bodies in work hold {self._total} bytes, {self._by_client[reservation.client]} of "
            f"them from this client; at most {self.max_bytes} are held, 16 times MAX_BODY_BYTES, "
            f"and of one client {_SHARE_OF_FREE} times what is left free"
        )


class ResponseMemory(Memory):
    """Responses that wait to be read; none is refused, but a stalled one is evicted."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self._check_scheduled = False

    def reserve(self, reservation: Reservation, size: int) -> None:
        """Hold a response of `size` bytes."""
        self._add(reservation, size, asyncio.get_running_loop().time())
        self._make_room()

    def release_sent(self, reservation: Reservation, size: int) -> None:
        """Release the `size` bytes that the client has made room for."""
        if reservation in self._reservations:
            self._change(reservation, -min(size, reservation.size))
            reservation.record_progress(size, asyncio.get_running_loop().time())

    def _make_room(self) -> None:
        """Evict stalled responses; check again later where that is not enough."""
        loop = asyncio.get_running_loop()
        while self._total > self.max_bytes and self._evict_stalled(loop.time()):
            pass
        if self._total > self.max_bytes and not self._check_scheduled:
            self._check_scheduled = True
            loop.call_later(STALLED_SECONDS, self._check_again)

    def _check_again(self) -> None:
        self._check_scheduled = False
        self._make_room()
