"""Limits the memory of requests by one budget in bytes.

Each chunk of a body is reserved as it arrives, and bodies hold at most half of the budget. After
tokenizing and before the forward, a request releases its body and reserves the memory for its
texts and its response. A client may hold at most three times what is free, and always 1 MiB, so
that a new client finds memory. A request that finds none gets 503 at once: no request waits for
memory while it holds some. The memory is released when the last byte is written, the connection
ends, or a time limit expires: the limit for bodies is here, where the client gets a response; those
for headers and unread responses are in `app/connection.py`.
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
from smart_embedder.requests import (
    ANSWER_BYTES,
    BYTES_PER_BODY_BYTE,
    IMAGE_BYTES,
    IMAGE_BYTES_PER_BODY_BYTE,
    AnswerMemory,
)

BODY_SECONDS = 10.0
MIN_BYTES_PER_SECOND = 1024
# When a stopped process continues, timers expire before it reads the bytes that have arrived.
_GRACE_SECONDS = 0.25
_MIN_PER_CLIENT = 1 << 20
_MAX_HELD_PER_FREE = 3
_MIN_BUDGET = 512 << 20
_BODIES_IN_BUDGET = 32
# A body takes up to ten times its bytes while it is read, a response three times the bytes of its
# vectors, its JSON included. With half a budget of each that is two fifths of the free memory;
# forwards get the rest.
_BUDGETS_IN_MEMORY = 16


class MemoryPool:
    """Counts the bytes that clients hold, at most `max_bytes` in total."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held = 0
        self._by_client: Counter[str] = Counter()

    @property
    def max_per_client(self) -> int:
        """The maximum that a client can hold while no other client holds any."""
        share = self.max_bytes * _MAX_HELD_PER_FREE // (_MAX_HELD_PER_FREE + 1)
        return min(self.max_bytes, max(_MIN_PER_CLIENT, share))

    def require(self, client: str, size: int) -> None:
        """Raise `QueueFullError` unless the client may hold `size` more bytes."""
        free, held = self.max_bytes - self.held - size, self._by_client[client]
        if free < 0 or held + size > max(_MIN_PER_CLIENT, _MAX_HELD_PER_FREE * free):
            raise QueueFullError(
                f"requests hold {self.held} bytes, {held} of them this client's, and this one "
                f"needs {size} more: at most {self.max_bytes} are held, and for one client at most "
                f"{_MAX_HELD_PER_FREE} times what is free",
                retry_after=1,
            )

    def change(self, client: str, size: int) -> None:
        """Add `size` to the bytes that the client holds; a negative size releases bytes."""
        self.held += size
        self._by_client[client] += size
        if not self._by_client[client]:
            del self._by_client[client]


class MemoryBudget(MemoryPool):
    """The memory of all requests; `bodies` is the part for bodies that are not tokenized yet."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self.bodies = MemoryPool(max_bytes // 2)

    @classmethod
    def for_bodies_of(cls, max_body_bytes: int) -> "MemoryBudget":
        """Create a budget of 512 MiB, or of 32 of the largest bodies if that is more."""
        return cls(max(_MIN_BUDGET, _BODIES_IN_BUDGET * max_body_bytes))

    def shrink_to(self, free_bytes: int) -> None:
        """Lower the budget to a sixteenth of the process's free memory."""
        self.max_bytes = min(self.max_bytes, free_bytes // _BUDGETS_IN_MEMORY)
        self.bodies.max_bytes = self.max_bytes // 2


class HeldMemory(AnswerMemory):
    """The memory that one request holds: first its body, then its texts and its response."""

    def __init__(self, budget: MemoryBudget, client: str, allowed: int = ANSWER_BYTES) -> None:
        super().__init__(allowed)
        self._budget = budget
        self._client = client
        self._reserved = self._reserved_for_body = 0

    @property
    def allowed(self) -> int:
        """The maximum size of the response in bytes."""
        allowed = self._allowed + BYTES_PER_BODY_BYTE * self.body_bytes
        return min(allowed, self._budget.max_per_client - self.body_bytes)

    @property
    def allowed_for_images(self) -> int:
        """The maximum size of decoded pictures in bytes."""
        allowed = IMAGE_BYTES + IMAGE_BYTES_PER_BODY_BYTE * self.body_bytes
        return min(allowed, self._budget.max_per_client)

    def add_body(self, size: int) -> None:
        """Reserve `size` more bytes for the body.

        Raises `BodyTooLargeError` if the body can never fit, and `QueueFullError` if it does not
        fit now.
        """
        bodies = self._budget.bodies
        if self.body_bytes + size > bodies.max_per_client:
            raise BodyTooLargeError(
                f"the body has more than {bodies.max_per_client} bytes, the most that fit into the "
                "memory of this service: send fewer texts, or raise the memory limit"
            )
        bodies.require(self._client, size)
        self._reserve(size)
        bodies.change(self._client, size)
        self._reserved_for_body += size
        self.body_bytes += size

    def reserve(self, size: int, what: str, advice: str) -> None:
        """Reserve memory for the response and release the body, as `AnswerMemory` requires."""
        super().reserve(size, what, advice)
        if (more := self.held - self._reserved) > 0:
            self._reserve(more)
        self._release_body()

    def release(self) -> None:
        """Release everything that the request holds."""
        self._release_body()
        self._budget.change(self._client, -self._reserved)
        self._reserved = 0

    def _reserve(self, size: int) -> None:
        self._budget.require(self._client, size)
        self._budget.change(self._client, size)
        self._reserved += size

    def _release_body(self) -> None:
        self._budget.bodies.change(self._client, -self._reserved_for_body)
        self._reserved_for_body = 0


@dataclass(eq=False, slots=True)
class LimitMemory:
    """Reserves memory of `budget` for each request, and lets a body stall for `body_seconds`.

    Requests without a body, such as those to /health, reserve none and are never refused.
    """

    app: ASGIApp
    budget: MemoryBudget
    body_seconds: float = BODY_SECONDS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reserve memory as the body arrives, and release all of it at the end."""
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
    """Passes a body on; raises `BodyStalledError` if it arrives too slowly.

    In each `window` of seconds, either MIN_BYTES_PER_SECOND or the rest of the body must arrive.
    """

    def __init__(self, receive: Receive, window: float) -> None:
        self._receive = receive
        self._window = window
        self._window_end = asyncio.get_running_loop().time() + window
        self._bytes_in_window = 0
        self._is_complete = False

    async def receive(self) -> Message:
        """Return the next message: a part of the body, or a message after the body."""
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
                raise self._build_error() from None
        self._bytes_in_window += len(message.get("body", b""))
        self._is_complete = not message.get("more_body", False)
        if (now := asyncio.get_running_loop().time()) >= self._window_end:
            if not self._is_complete and self._bytes_in_window < self._min_bytes:
                raise self._build_error()
            self._bytes_in_window, self._window_end = 0, now + self._window
        return message

    @property
    def _min_bytes(self) -> float:
        return MIN_BYTES_PER_SECOND * self._window

    def _build_error(self) -> BodyStalledError:
        return BodyStalledError(
            f"the body arrived too slowly: within {self._window:g} s, send the rest of it or at "
            f"least {MIN_BYTES_PER_SECOND} bytes a second"
        )


class LimitBody:
    """Answers 413 as soon as a body is known to be larger than `max_bytes`."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check Content-Length, then count the bytes that arrive."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        context, announced = context_of(scope), Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced) > self._max_bytes:
            await error_response(scope, self._build_error())(scope, receive, send)
            return

        async def receive_limited() -> Message:
            message = await receive()
            if context.bytes_in > self._max_bytes:
                raise self._build_error()
            return message

        await self.app(scope, receive_limited, send)

    def _build_error(self) -> BodyTooLargeError:
        return BodyTooLargeError(
            f"the body is larger than {self._max_bytes} bytes (MAX_BODY_BYTES): send fewer texts"
        )
