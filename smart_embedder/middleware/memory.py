"""Limits the memory of request bodies, and of answers from before they are made to their end.

A request waits for its client while its body arrives and while its response is read. When memory is
short, one that has waited for a second without progress is evicted. A request that the service
works on is never evicted. Knows neither what is in a body nor how an answer is made: the engine and
the formats say what they need through the request's `AnswerMemory`.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from smart_embedder.api.context import context_of
from smart_embedder.engine.records import BYTES_PER_BODY_BYTE, AnswerMemory
from smart_embedder.errors import BodyStalledError, BodyTooLargeError, QueueFullError
from smart_embedder.observability.logs import SampledLog

BODY_SECONDS = 10.0
MIN_BYTES_PER_SECOND = 1024
STALLED_SECONDS = 1.0
# Fewer bytes than this in a second count as no progress where memory is short.
_PROGRESS_BYTES = 16_384
_SHARE_OF_FREE = 3
_BYTES_PER_ANSWER_BYTE = 3
# After a process was stopped, timers expire before the bytes that arrived meanwhile are read.
_GRACE_SECONDS = 0.25


@dataclass(eq=False)
class LimitMemory:
    """Holds about as much of request bodies and of answers as `bodies` and `responses` allow.

    A client that holds more than its share gets 503 for large bodies and answers, a stalled body
    gets 408, and a response that is not read is cut off. One answer may hold `answer_bytes`, and
    more where its body is large. Requests without a body, such as those to /health, are never
    refused. A body must make progress within each `body_seconds`.
    """

    app: ASGIApp
    bodies: "BodyMemory"
    responses: "ResponseMemory"
    body_seconds: float = BODY_SECONDS
    _: KW_ONLY
    answer_bytes: int

    def __post_init__(self) -> None:
        self.log = SampledLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count what this request holds, and release it at the end."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = Exchange(self, scope, receive, send)
        try:
            await self.app(scope, exchange.receive, exchange.send)
        finally:
            exchange.release()


class Exchange:
    """One request: it holds its body until its response begins, and its answer until it is sent."""

    def __init__(self, limit: LimitMemory, scope: Scope, receive: Receive, send: Send) -> None:
        self._limit, self._send = limit, send
        context = context_of(scope)
        self._held_body = Reservation(context.client)
        self._body = TimedBody(receive, self._held_body, limit.body_seconds)
        # Only our own connections can be aborted; other servers have limits of their own.
        self._abort: Callable[[], None] | None = scope["state"].get("abort_connection")
        context.answer = self._answer = HeldAnswer(
            limit.responses,
            context.client,
            limit.answer_bytes,
            self._cut_off if self._abort else None,
        )

    async def receive(self) -> Message:
        """Receive a part of the body; raises `QueueFullError` if there is no room for it."""
        message = await self._body.receive()
        if size := len(message.get("body", b"")):
            if self._held_body.size + size > (most := self._limit.bodies.most_of_one):
                raise BodyTooLargeError(
                    f"the body has more than {most} bytes, for which the memory that this service "
                    "may use has no room: send fewer texts, or raise the memory limit"
                )
            self._limit.bodies.reserve(self._held_body, size)
            self._answer.body_bytes += size
        return message

    async def send(self, message: Message) -> None:
        """Send a part of the response; when it begins, the body is counted with it if at all."""
        answer = self._answer
        if message["type"] == "http.response.start":
            self._limit.bodies.release(self._held_body)
            length = Headers(raw=message["headers"]).get("content-length")
            answer.begin(None if length is None else int(length))
        await self._send(message)
        answer.sent(len(message.get("body", b"")))

    def release(self) -> None:
        """Hold nothing any more."""
        self._limit.bodies.release(self._held_body)
        self._answer.release()

    def _cut_off(self) -> None:
        self._limit.log.warning("answer_not_taken", reason="unread answers fill the memory")
        if self._abort:
            self._abort()


class TimedBody:
    """Passes a body on; raises `BodyStalledError` where it arrives too slowly.

    In each `window` of seconds MIN_BYTES_PER_SECOND or the rest of the body must arrive. While it
    waits for more, `held` can be evicted, which makes it raise at once.
    """

    def __init__(self, receive: Receive, held: "Reservation", window: float) -> None:
        self._receive, self._held, self._window = receive, held, window
        self._bytes_in_window = 0
        self._window_end = asyncio.get_running_loop().time() + window
        self._timeout: asyncio.Timeout | None = None
        self._is_evicted = False
        self.complete = False

    async def receive(self) -> Message:
        """The next message: a part of the body, or what follows it."""
        if self.complete:
            return await self._receive()
        late = False
        self._held.evict = self._evict
        try:
            message = await self._receive_until(self._window_end)
        except TimeoutError:
            late = True
            # What has arrived although the time is over.
            now = asyncio.get_running_loop().time()
            try:
                message = await self._receive_until(now + _GRACE_SECONDS)
            except TimeoutError:
                raise self._error() from None
        finally:
            self._held.evict = None
        self._bytes_in_window += len(message.get("body", b""))
        self.complete = not message.get("more_body", False)
        if late:
            if not self.complete and self._bytes_in_window < MIN_BYTES_PER_SECOND * self._window:
                raise self._error()
            self._bytes_in_window = 0
            self._window_end = asyncio.get_running_loop().time() + self._window
        return message

    def _evict(self) -> None:
        """Fail the request now, because its body stalls while memory is short."""
        self._is_evicted = True
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())

    async def _receive_until(self, moment: float) -> Message:
        if self._is_evicted:
            raise self._error()
        try:
            async with asyncio.timeout_at(moment) as self._timeout:
                return await self._receive()
        finally:
            self._timeout = None

    def _error(self) -> BodyStalledError:
        if self._is_evicted:
            return BodyStalledError(
                "the body did not go on for a second while memory was short: send it without pause"
            )
        return BodyStalledError(
            f"the body came too slowly: {self._window:g} s must bring the rest of it, "
            f"or {MIN_BYTES_PER_SECOND} bytes a second"
        )


class HeldAnswer(AnswerMemory):
    """What the answer to one request may hold: `max_bytes`, and more for a large body.

    It is taken from `responses` before it is made. `begin` is called when its first bytes are sent.
    """

    def __init__(
        self,
        responses: "ResponseMemory",
        client: str,
        max_bytes: int,
        cut_off: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(max_bytes)
        self.reservation = Reservation(client)
        self._responses = responses
        self._cut_off = cut_off
        self._is_rendered = False
        self._is_released = False

    @property
    def allowed(self) -> int:
        """The most bytes that the answer may hold."""
        allowed = self._allowed + BYTES_PER_BODY_BYTE * self.body_bytes
        return min(allowed, self._responses.most_of_one)

    def need(self, size: int, what: str, advice: str) -> None:
        """Implement `AnswerMemory`."""
        super().need(size, what, advice)
        # Work that others share goes on when its request is over, and is counted for them.
        if size > self.reservation.size and not self._is_released:
            self._responses.reserve(self.reservation, size - self.reservation.size)

    def begin(self, length: int | None) -> None:
        """The answer is there: `length` bytes, or None where it is rendered while it is read.

        Then its vectors are held to the end, and so are the texts of the request.
        """
        self._is_rendered = length is not None
        if length is not None:
            self._responses.release(self.reservation)
        # From now on, and not from when it was begun to be made.
        self.reservation.begin_to_wait(self._cut_off)
        self._responses.hold(self.reservation, self.body_bytes if length is None else length)

    def sent(self, size: int) -> None:
        """Record that `size` bytes of it were sent."""
        if self._is_rendered:
            self._responses.release(self.reservation, size)
        self.reservation.record_progress(size)

    def release(self) -> None:
        """Hold nothing any more, whatever is needed later."""
        self._is_released = True
        self._responses.release(self.reservation)
        self.reservation.evict = self._cut_off = None  # Ends a reference cycle.


@dataclass(eq=False, slots=True)
class Reservation:
    """The bytes held for one request; `evict` ends it, and is None while it must not be evicted."""

    client: str
    evict: Callable[[], None] | None = None
    size: int = 0
    progress_at: float = 0.0
    bytes_since: int = 0

    def begin_to_wait(self, evict: Callable[[], None] | None) -> None:
        """It can be evicted from now on, where its client makes no progress from now on."""
        self.progress_at, self.bytes_since = asyncio.get_running_loop().time(), 0
        self.evict = evict

    def record_progress(self, size: int) -> None:
        """Record that the client has sent, or read, `size` bytes."""
        self.bytes_since += size
        if self.bytes_since >= _PROGRESS_BYTES:
            self.progress_at, self.bytes_since = asyncio.get_running_loop().time(), 0


class Memory:
    """The bytes held for all requests, of bodies or of responses, about `max_bytes` at most.

    A client may hold three times the bytes that are free, which is three quarters for a single one,
    so that no client can fill the memory. What is at most `small` is refused only without any room
    at all. `full` says why `size` bytes are refused to a client that holds `own`.
    """

    small: int
    full: str

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._total = 0
        self._by_client: Counter[str] = Counter()
        # In their order: of equals the first one is evicted.
        self._reservations: dict[Reservation, None] = {}
        self._check_scheduled = False

    @property
    def most_of_one(self) -> int:
        """The most bytes that one client can hold, while no other one holds any."""
        return max(self.small, self.max_bytes * _SHARE_OF_FREE // (_SHARE_OF_FREE + 1))

    def reserve(self, reservation: Reservation, size: int) -> None:
        """Hold `size` more bytes; evict stalled requests for them, or raise `QueueFullError`."""
        while not self._fits(reservation, size):
            over_all = self._total + size > self.max_bytes
            if not self._evict_stalled(None if over_all else reservation.client):
                facts = {"total": self._total, "own": self._by_client[reservation.client]}
                facts |= {"size": size, "most": self.max_bytes, "share": _SHARE_OF_FREE}
                raise QueueFullError(self.full.format_map(facts), retry_after=1)
        self._change(reservation, size)
        reservation.record_progress(size)

    def hold(self, reservation: Reservation, size: int) -> None:
        """Hold `size` bytes that are there already: stalled requests are evicted for them."""
        self._change(reservation, size)
        self._evict_until_it_fits()

    def release(self, reservation: Reservation, size: int | None = None) -> None:
        """Release `size` bytes of it, or all, and forget it then."""
        if reservation in self._reservations:
            freed = reservation.size if size is None else min(size, reservation.size)
            self._change(reservation, -freed)
            if size is None:
                del self._reservations[reservation]

    def _fits(self, reservation: Reservation, size: int) -> bool:
        free = self.max_bytes - self._total - size
        if free < 0:
            return False
        own = self._by_client[reservation.client] + size
        return reservation.size + size <= self.small or own <= _SHARE_OF_FREE * free

    def _change(self, reservation: Reservation, size: int) -> None:
        if reservation not in self._reservations:
            self._reservations[reservation] = None
            reservation.progress_at = asyncio.get_running_loop().time()
        reservation.size += size
        self._total += size
        self._by_client[reservation.client] += size
        if not self._by_client[reservation.client]:
            del self._by_client[reservation.client]

    def _evict_stalled(self, client: str | None = None) -> bool:
        """Evict one stalled request, of `client` or else of the client that holds most.

        It is the one that has made no progress for longest. False if none is stalled.
        """
        now = asyncio.get_running_loop().time()
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

    def _evict_until_it_fits(self) -> None:
        """Evict stalled requests; check again later if that is not enough."""
        while self._total > self.max_bytes and self._evict_stalled():
            pass
        if self._total > self.max_bytes and not self._check_scheduled:
            self._check_scheduled = True
            asyncio.get_running_loop().call_later(STALLED_SECONDS, self._check_again)

    def _check_again(self) -> None:
        self._check_scheduled = False
        self._evict_until_it_fits()


def fit_to_memory(bodies: Memory, responses: Memory, left: int) -> None:
    """Lower both limits to what a process with `left` bytes of memory can hold.

    Bodies get a sixth of it, and take up to ten times their bytes while they are read. Answers get
    a quarter, and take about three times the bytes of their vectors, with the text that these
    become. A third is for forwards.
    """
    bodies.max_bytes = min(bodies.max_bytes, left // (6 * BYTES_PER_BODY_BYTE))
    responses.max_bytes = min(responses.max_bytes, left // (4 * _BYTES_PER_ANSWER_BYTE))


class BodyMemory(Memory):
    """Request bodies that arrive or are worked on."""

    small = 65_536
    full = (
        "bodies in work hold {total} bytes, {own} of them from this client; at most {most} are "
        "held, 16 times MAX_BODY_BYTES or what the memory has room for, and of one client {share} "
        "times what is left free"
    )


class ResponseMemory(Memory):
    """Answers that are to be made, are made, or wait to be read."""

    small = 1 << 20
    full = (
        "answers in work hold {total} bytes, {own} of them for this client, and this one needs "
        "{size} more; at most {most} are held, 16 times MAX_BODY_BYTES, 4 times "
        "MAX_ANSWER_BYTES or what the memory has room for, and of one client {share} times what is "
        "left free"
    )
