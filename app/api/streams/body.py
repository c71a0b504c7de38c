"""The body of a stream: read ahead within limits, and taken line by line."""

import asyncio
from collections.abc import Awaitable, Callable, Generator

from starlette.types import Receive

from app.api.context import StreamMemory
from app.api.streams.lines import Line, LineReader
from app.errors import AnswerNotTakenError, ClientGoneError, SmartEmbedderError

READ_AHEAD_BYTES = 1 << 20
# After that a client may be one that reads only when it has sent its whole body.
_STALLED_SECONDS = 1.0
_LOOK_SECONDS = 0.25


class StreamBody:
    """Reads the lines of a stream in a task of its own, `read`, while others take them.

    At most READ_AHEAD_BYTES are read ahead. `stalled_seconds` is how long the client has read
    nothing of the answer. After a second it may be one that sends its whole body first, and up to
    `max_ahead` bytes are read. If the body is longer, and the client still reads nothing after
    `patience` seconds, `given_up` is set to the error, and the rest of the body is dropped, so that
    a client that reads only after sending gets the error. `run` runs the steps of parsing lines.
    """

    def __init__(
        self,
        receive: Receive,
        lines: LineReader,
        memory: StreamMemory | None,
        stalled_seconds: Callable[[], float],
        is_closing: Callable[[], bool] | None,
        *,
        run: Callable[[Generator[None, None, list[Line]]], Awaitable[list[Line]]],
        max_ahead: int,
        patience: float,
    ) -> None:
        self._receive = receive
        self._lines = lines
        self._memory = memory
        self._stalled_seconds = stalled_seconds
        self._is_closing = is_closing
        self._run = run
        self._max_ahead = max(max_ahead, READ_AHEAD_BYTES)
        self._patience = patience
        self._held = 0
        self._complete = False
        self._error: SmartEmbedderError | None = None
        self._arrived = asyncio.Event()
        self._taken = asyncio.Event()
        self._stopped_by: SmartEmbedderError | None = None
        self.given_up: SmartEmbedderError | None = None

    async def begin(self) -> None:
        """Read the first part, and what is needed to know how the lines are read."""
        await self._read_part()
        while not (self._lines.begun or self._complete):
            await self._read_part()

    async def read(self) -> None:
        """Read to the end, then until the client leaves: raises `ClientGoneError`."""
        while not self._complete and self._error is None:
            try:
                await self._wait_for_room()
                await self._read_part()
            except ClientGoneError:
                raise
            except SmartEmbedderError as error:
                self._error = error
            self._arrived.set()
        await self._drop_the_rest()

    def stop(self, error: SmartEmbedderError) -> None:
        """End the body: `take` raises `error` from now on."""
        self._stopped_by = self._stopped_by or error
        self._arrived.set()

    async def take(self, max_lines: int, max_bytes: int) -> list[Line]:
        """The next lines that have arrived; empty at the end of the body.

        Raises an error of the body once the lines before it are taken.
        """
        while self._stopped_by is None:
            self._arrived.clear()
            lines = await self._run(self._lines.take(max_lines, max_bytes))
            self._release_unused()
            if lines:
                self._taken.set()
                return lines
            if self._arrived.is_set():  # Meanwhile, behind what was looked at.
                continue
            if self._error is not None:
                raise self._error
            if self._complete:
                return []
            await self._arrived.wait()
        raise self._stopped_by

    async def _read_part(self) -> None:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError("the client left before its stream was complete")
        body = message.get("body", b"")
        self._held += len(body)
        self._lines.feed(body)
        self._release_unused()
        if not message.get("more_body", False):
            self._complete = True
            self._lines.end()

    def _release_unused(self) -> None:
        unused = self._held - self._lines.buffered
        if self._memory is not None and unused > 0:
            self._memory.release_body(unused)
            self._held -= unused

    async def _wait_for_room(self) -> None:
        while self._lines.ready and self._lines.buffered >= self._limit():
            self._taken.clear()
            try:
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._taken.wait()
            except TimeoutError:
                self._check_client()

    def _check_client(self) -> None:
        """Raise an error if the client has left, which `receive` would tell, or does not read."""
        if self._is_closing is not None and self._is_closing():
            raise ClientGoneError("the client left before its stream was answered")
        if self._stalled_seconds() >= self._patience:
            self.given_up = self._not_taken()
            self.stop(self.given_up)
            raise self.given_up

    def _limit(self) -> int:
        stalled = self._stalled_seconds() >= _STALLED_SECONDS
        return self._max_ahead if stalled else READ_AHEAD_BYTES

    def _not_taken(self) -> SmartEmbedderError:
        return AnswerNotTakenError(
            f"the results were not read for {self._patience:g} seconds (REQUEST_TIMEOUT) while "
            f"more than {self._max_ahead} bytes of lines (MAX_BODY_BYTES) waited: read while you "
            "send, or send fewer lines in one stream"
        )

    async def _drop_the_rest(self) -> None:
        """Drop the rest of the body, so that a client that is still sending can read the error."""
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError("the client left before its stream was answered")
            if self._memory is not None:
                self._memory.release_body(len(message.get("body", b"")))
