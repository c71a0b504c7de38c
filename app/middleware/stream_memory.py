"""Counts the bytes held for a stream: lines that wait, and vectors that wait to be read.

A stream releases bytes while it runs, and waits when memory is short. Like other requests it is
evicted only while it waits for its own client.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from starlette.types import Message, Receive, Scope, Send

from app.api.context import context_of
from app.engine.answer_memory import AnswerMemory
from app.errors import BodyStalledError, QueueFullError
from app.middleware.held_memory import BodyMemory, Reservation, ResponseMemory

_RETRY_SECONDS = 0.5


class StreamedExchange:
    """One stream, whose client may pause for `patience` seconds before it sends more."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        bodies: BodyMemory,
        responses: ResponseMemory,
        patience: float,
        answer_bytes: int,
    ) -> None:
        context = context_of(scope)
        context.memory = self
        # Of one piece; those that are made are counted by `hold_vectors`.
        context.answer = AnswerMemory(answer_bytes)
        self._bodies, self._responses, self._patience = bodies, responses, patience
        self._receive, self._send = receive, send
        # Only app.server's connections can be aborted; other servers have limits of their own.
        self._abort: Callable[[], None] | None = scope["state"].get("abort_connection")
        self._held_body = Reservation(context.client, None)
        self._held_vectors = Reservation(context.client, None)
        self._gave_way = False
        self._complete = False

    async def receive(self) -> Message:
        """Receive a part of the body, and wait until there is room for it."""
        if self._complete:
            return await self._receive()
        deadline = asyncio.timeout(self._patience)
        with self._may_give_way(self._held_body, partial(self._stop_waiting, deadline)):
            message = await self._receive_until(deadline)
        self._complete = not message.get("more_body", False)
        size = len(message.get("body", b""))
        if size:
            await self._reserve(size)
        return message

    async def send(self, message: Message) -> None:
        """Send a part of the answer."""
        with self._may_give_way(self._held_vectors, self._abort):
            await self._send(message)

    def release_body(self, size: int) -> None:
        """Record that `size` bytes of the body are no longer held."""
        self._bodies.release_part(self._held_body, size)

    def hold_vectors(self, size: int) -> None:
        """Record that `size` bytes of vectors wait to be sent."""
        self._responses.reserve(self._held_vectors, size)

    def release_vectors(self, size: int) -> None:
        """Record that `size` bytes of vectors no longer wait."""
        self._responses.release_sent(self._held_vectors, size)

    def release(self) -> None:
        """Hold nothing any more."""
        self._bodies.release(self._held_body)
        self._responses.release(self._held_vectors)

    @contextmanager
    def _may_give_way(
        self, reservation: Reservation, evict: Callable[[], None] | None
    ) -> Iterator[None]:
        reservation.progress_at = asyncio.get_running_loop().time()
        reservation.evict = evict
        try:
            yield
        finally:
            reservation.evict = None

    def _stop_waiting(self, deadline: asyncio.Timeout) -> None:
        self._gave_way = True
        if not deadline.expired():
            deadline.reschedule(asyncio.get_running_loop().time())

    async def _receive_until(self, deadline: asyncio.Timeout) -> Message:
        try:
            async with deadline:
                return await self._receive()
        except TimeoutError:
            raise self._stalled() from None

    def _stalled(self) -> BodyStalledError:
        if self._gave_way:
            return BodyStalledError(
                "the body did not go on for a second while memory was short: send it without pause"
            )
        return BodyStalledError(
            f"nothing of the body came for {self._patience:g} seconds (REQUEST_TIMEOUT): end the "
            "stream where there is a longer pause"
        )

    async def _reserve(self, size: int) -> None:
        """Wait for room, `patience` seconds at most, and then raise `QueueFullError`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience
        while True:
            try:
                self._bodies.reserve(self._held_body, size)
            except QueueFullError:
                if loop.time() >= deadline:
                    raise
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                return
