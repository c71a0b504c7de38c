"""Limits the memory of requests by one budget in bytes.

Each chunk of a body is reserved as it arrives, and bodies hold at most half of the budget; after
tokenising and before the forward, a request swaps its body for what its texts and its answer need.
A client may hold at most three times what is free, and always 1 MiB, so that a newcomer finds room;
what finds no room gets 503 at once, because nothing waits for memory while it holds some. All of it
is released when the last byte is written, the connection ends, or a time limit strikes: that of a
body is here, where it gets an answer, and those of headers and unread answers are in
`app/connection.py`.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.context import context_of
from app.error_responses import error_response
from app.errors import BodyStalledError, BodyTooLargeError
from smart_embedder.errors import QueueFullError
from smart_embedder.requests import ANSWER_BYTES, BYTES_PER_BODY_BYTE, AnswerMemory

BODY_SECONDS = 10.0
MIN_BYTES_PER_SECOND = 1024
# After a process was stopped, timers expire before the bytes that arrived meanwhile are read.
_GRACE_SECONDS = 0.25
_ALWAYS = 1 << 20
_SHARE_OF_FREE = 3
_BUDGET = 512 << 20
_BODIES_IN_BUDGET = 32
# A body takes up to ten times its bytes while it is read, an answer three times those of its
# vectors with the JSON that these become. With half a budget of each this is two fifths of what is
# left, and forwards have the rest.
_BUDGETS_IN_MEMORY = 16


class MemoryPool:
    """The bytes that clients hold, at most `max_bytes` together."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held = 0
        self._by_client: Counter[str] = Counter()

    @property
    def most_of_one(self) -> int:
        """The most bytes that a client can hold while no other one holds any."""
        share = self.max_bytes * _SHARE_OF_FREE // (_SHARE_OF_FREE + 1)
        return min(self.max_bytes, max(_ALWAYS, share))

    def require(self, client: str, size: int) -> None:
        """Raise `QueueFullError` unless a client may hold `size` bytes more."""
        free, held = self.max_bytes - self.held - size, self._by_client[client]
        if free < 0 or held + size > max(_ALWAYS, _SHARE_OF_FREE * free):
            raise QueueFullError(
                f"requests hold {self.held} bytes, {held} of them this client's, and this one "
                f"needs {size} more: at most {self.max_bytes} are held, and for one client at most "
                f"{_SHARE_OF_FREE} times what is free",
                retry_after=1,
            )

    def change(self, client: str, size: int) -> None:
        """A client holds `size` bytes more, or less where that is negative."""
        self.held += size
        self._by_client[client] += size
        if not self._by_client[client]:
            del self._by_client[client]


class MemoryBudget(MemoryPool):
    """What all requests hold, and `bodies`, the part of it that is not yet tokenised."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self.bodies = MemoryPool(max_bytes // 2)

    @classmethod
    def of(cls, max_body_bytes: int) -> "MemoryBudget":
        """512 MiB, or 32 of the largest bodies where that is more."""
        return cls(max(_BUDGET, _BODIES_IN_BUDGET * max_body_bytes))

    def fit(self, left: int) -> None:
        """Lower it to what a process with `left` bytes of memory can hold."""
        self.max_bytes = min(self.max_bytes, left // _BUDGETS_IN_MEMORY)
        self.bodies.max_bytes = self.max_bytes // 2


class HeldMemory(AnswerMemory):
    """What one request holds of a budget: its body, then its texts and its answer."""

    def __init__(self, budget: MemoryBudget, client: str, allowed: int = ANSWER_BYTES) -> None:
        super().__init__(allowed)
        self._budget = budget
        self._client = client
        self._reserved = self._of_body = 0

    @property
    def allowed(self) -> int:
        """The most bytes that the answer may hold."""
        allowed = self._allowed + BYTES_PER_BODY_BYTE * self.body_bytes
        return min(allowed, self._budget.most_of_one - self.body_bytes)

    def add_body(self, size: int) -> None:
        """Hold `size` more bytes of the body.

        Raises `BodyTooLargeError` where there can never be room for it, and `QueueFullError` where
        there is none at present.
        """
        bodies = self._budget.bodies
        if self.body_bytes + size > bodies.most_of_one:
            raise BodyTooLargeError(
                f"the body has more than {bodies.most_of_one} bytes, for which the memory that "
                "this service may use has no room: send fewer texts, or raise the memory limit"
            )
        bodies.require(self._client, size)
        self._reserve(size)
        bodies.change(self._client, size)
        self._of_body += size
        self.body_bytes += size

    def need(self, size: int, what: str, advice: str) -> None:
        """Implement `AnswerMemory`."""
        super().need(size, what, advice)
        if (more := self.held - self._reserved) > 0:
            self._reserve(more)
        self._release_body()

    def release(self) -> None:
        """Hold nothing any more."""
        self._release_body()
        self._budget.change(self._client, -self._reserved)
        self._reserved = 0

    def _reserve(self, size: int) -> None:
        self._budget.require(self._client, size)
        self._budget.change(self._client, size)
        self._reserved += size

    def _release_body(self) -> None:
        self._budget.bodies.change(self._client, -self._of_body)
        self._of_body = 0


@dataclass(eq=False, slots=True)
class LimitMemory:
    """Holds memory of `budget` for each request, and lets a body stall for `body_seconds`.

    Requests without a body, such as those to /health, hold none and are never refused.
    """

    app: ASGIApp
    budget: MemoryBudget
    body_seconds: float = BODY_SECONDS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hold what the request needs, and release it at the end."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        context = context_of(scope)
        context.answer = held = HeldMemory(self.budget, context.client)
        body = TimedBody(receive, self.body_seconds)

        async def receive_held() -> Message:
            message = await body.receive()
            if size := len(message.get("body", b"")):
                held.add_body(size)
            return message

        try:
            await self.app(scope, receive_held, send)
        finally:
            held.release()


class TimedBody:
    """Passes a body on; raises `BodyStalledError` where it arrives too slowly.

    In each `window` of seconds MIN_BYTES_PER_SECOND or the rest of the body must arrive.
    """

    def __init__(self, receive: Receive, window: float) -> None:
        self._receive = receive
        self._window = window
        self._window_end = asyncio.get_running_loop().time() + window
        self._bytes_in_window = 0
        self._is_complete = False

    async def receive(self) -> Message:
        """The next message: a part of the body, or what follows it."""
        if self._is_complete:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._window_end):
                message = await self._receive()
        except TimeoutError:
            try:
                async with asyncio.timeout(_GRACE_SECONDS):
                    message = await self._receive()
            except TimeoutError:
                raise self._error() from None
        self._bytes_in_window += len(message.get("body", b""))
        self._is_complete = not message.get("more_body", False)
        if (now := asyncio.get_running_loop().time()) >= self._window_end:
            if not self._is_complete and self._bytes_in_window < self._least:
                raise self._error()
            self._bytes_in_window, self._window_end = 0, now + self._window
        return message

    @property
    def _least(self) -> float:
        return MIN_BYTES_PER_SECOND * self._window

    def _error(self) -> BodyStalledError:
        return BodyStalledError(
            f"the body came too slowly: {self._window:g} s must bring the rest of it, "
            f"or {MIN_BYTES_PER_SECOND} bytes a second"
        )


class LimitBody:
    """Answers 413 as soon as a body is known to be larger than `max_bytes`."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the announced length, then count what arrives."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        context, announced = context_of(scope), Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced) > self._max_bytes:
            await error_response(scope, self._error())(scope, receive, send)
            return

        async def receive_limited() -> Message:
            message = await receive()
            if context.bytes_in > self._max_bytes:
                raise self._error()
            return message

        await self.app(scope, receive_limited, send)

    def _error(self) -> BodyTooLargeError:
        return BodyTooLargeError(
            f"the body is larger than {self._max_bytes} bytes (MAX_BODY_BYTES): send fewer texts"
        )
