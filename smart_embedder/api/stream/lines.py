"""The body of a stream: read ahead within limits, and taken line by line."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Protocol, TypeGuard

import orjson
from pydantic import JsonValue, PlainValidator, ValidationError
from pydantic_core import PydanticCustomError
from starlette.types import Message, Receive

from smart_embedder import errors
from smart_embedder.api.body import JsonValueCounter, parse_large
from smart_embedder.api.context import StreamMemory
from smart_embedder.api.errors import as_invalid_request, not_json
from smart_embedder.api.schemas import RequestModel

_INT64 = 2**63
# A parser takes a tenth of a millisecond for a line of this size, whatever is in it.
_HARMLESS_BYTES = 4096
# Of lines, read in one step: it takes a parser two milliseconds, whatever is in them.
STEP_BYTES = 65_536
_MAX_VALUES = 16
# Of one piece: to say what is wrong with a line takes ten times as long as to read a good one.
_MAX_BAD_LINES = 64
_NOT_BLANK = re.compile(rb"\S")
READ_AHEAD_BYTES = 1 << 20
# After that a client may be one that reads only when it has sent its whole body.
_STALLED_SECONDS = 1.0
_LOOK_SECONDS = 0.25


def _is_id(value: object) -> TypeGuard[int | str | None]:
    if isinstance(value, int):
        return not isinstance(value, bool) and -_INT64 <= value < _INT64
    return value is None or isinstance(value, str)


def _check_id(value: object) -> int | str | None:
    """The id; one error, where a union of types would raise one for each type."""
    if _is_id(value):
        return value
    raise PydanticCustomError("id_type", "send a string, or a whole number of 64 bits")


class StreamLine(RequestModel):
    """A text, and the id of its record."""

    example: ClassVar[Mapping[str, JsonValue]] = {"id": "a1", "text": "What is hybrid search?"}
    aliases: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("sentence", "sentences", "input", "inputs", "content", "document", "passage"), "text"
    )

    text: str
    id: Annotated[int | str | None, PlainValidator(_check_id)] = None


@dataclass(frozen=True, slots=True)
class Line:
    """A text, or the error of a line that holds none.

    `number` is the line's number in the body, from 1. `id` is its own id, or else its index among
    the records, from 0. `size` is its size in the body, in bytes.
    """

    number: int
    id: int | str
    size: int
    text: str = ""
    error: errors.SmartEmbedderError | None = None


class LineReader(Protocol):
    """Splits a body, which arrives in chunks of any size, into lines.

    `begun` says whether enough has arrived to know how lines are read. Each method raises
    `SmartEmbedderError` for what cannot be read as lines at all.
    """

    begun: bool

    @property
    def integer_ids(self) -> bool:
        """Whether all ids are numbers."""

    @property
    def buffered(self) -> int:
        """Bytes that have arrived and are not taken."""

    @property
    def ready(self) -> bool:
        """Whether a line can be taken."""

    def feed(self, chunk: bytes) -> None:
        """Take the next part of the body."""

    def end(self) -> None:
        """The body is complete."""

    def take(self, max_lines: int, max_bytes: int) -> Generator[None, None, list[Line]]:
        """The next lines: at least one, if one is ready; each step takes a few milliseconds."""


class NdjsonReader:
    """A line of JSON for each text: an object with `text` and, if it has one, `id`; or a string.

    Blank lines are skipped. A line of more than `max_line_bytes` is an error in its place, and is
    not kept while it arrives.
    """

    begun = True
    integer_ids = False

    def __init__(self, max_line_bytes: int) -> None:
        self._max_line_bytes = max_line_bytes
        self._buffer = bytearray()
        # Where what is not taken begins, and where to look for the next end of a line.
        self._begin = self._searched = 0
        self._skipped = self._number = self._records = 0
        self._ended = False

    @property
    def buffered(self) -> int:
        """Bytes that have arrived and are not taken."""
        return len(self._buffer)

    @property
    def ready(self) -> bool:
        """Whether a line can be taken."""
        is_ready = self._end_of_next() >= 0
        self._forget_taken()
        return is_ready

    def feed(self, chunk: bytes) -> None:
        """Take the next part of the body."""
        self._buffer += chunk
        waiting = len(self._buffer) - self._begin
        if waiting > self._max_line_bytes and self._end_of_line() < 0:
            self._skipped += waiting
            self._begin = len(self._buffer)
            self._forget_taken()

    def end(self) -> None:
        """The body is complete: the last line needs no end."""
        self._ended = True

    def take(self, max_lines: int, max_bytes: int) -> Generator[None, None, list[Line]]:
        """The next lines: at least one, if one is ready; fewer where many are bad."""
        lines: list[Line] = []
        size = bad = stepped = 0
        while len(lines) < max_lines and bad < _MAX_BAD_LINES and (not lines or size < max_bytes):
            end = self._end_of_next()
            if end < 0:
                break
            with memoryview(self._buffer) as buffer:  # A slice would be a copy of its own.
                content = bytes(buffer[self._begin : end])
            self._begin = self._searched = min(end + 1, len(self._buffer))
            lines.append((yield from self._line(content)))
            size += lines[-1].size
            bad += lines[-1].error is not None
            if size - stepped >= STEP_BYTES:
                stepped = size
                yield
        # Only once, because it moves the bytes that follow.
        self._forget_taken()
        return lines

    def _line(self, content: bytes) -> Generator[None, None, Line]:
        size, self._skipped = self._skipped + len(content), 0
        # Kept, because more is read while a large line is parsed.
        number = self._number = self._number + 1
        index, self._records = self._records, self._records + 1
        try:
            if size > self._max_line_bytes:
                raise too_large("line", self._max_line_bytes)
            text, name = yield from _parse(content)
        except errors.SmartEmbedderError as error:
            return Line(number, index, size, error=error)
        return Line(number, index if name is None else name, size, text)

    def _end_of_next(self) -> int:
        """Where the next line that is not blank ends; -1 if it is not complete."""
        if not self._skipped and self._buffer[self._begin : self._begin + 1].isspace():
            # Blank lines, and the blanks that a line begins with, each byte looked at once.
            found = _NOT_BLANK.search(self._buffer, self._begin)
            stop = len(self._buffer) if found is None else found.start()
            del found  # A buffer cannot change its size while something refers into it.
            self._number += self._buffer.count(b"\n", self._begin, stop)
            self._begin = self._searched = stop
        end = self._end_of_line()
        if end < 0 and self._ended and (self._skipped or self._begin < len(self._buffer)):
            return len(self._buffer)
        return end

    def _end_of_line(self) -> int:
        found = self._buffer.find(b"\n", self._searched)
        self._searched = len(self._buffer) if found < 0 else found
        return found

    def _forget_taken(self) -> None:
        del self._buffer[: self._begin]
        self._searched = max(0, self._searched - self._begin)
        self._begin = 0


def too_large(what: str, max_bytes: int) -> errors.BodyTooLargeError:
    """The error for a part of the body that is larger than a whole one may be elsewhere."""
    return errors.BodyTooLargeError(
        f"the {what} is larger than {max_bytes} bytes (MAX_BODY_BYTES): split the text"
    )


def _parse(content: bytes) -> Generator[None, None, tuple[str, int | str | None]]:
    """A line's text and id; raises an `InvalidRequestError` that says what is wrong with it."""
    if len(content) > _HARMLESS_BYTES:
        value = yield from _parse_large(content)
    else:
        try:
            value = orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise _of_line(not_json(str(error), StreamLine, len(content))) from None
    if isinstance(value, str):
        return value, None
    if _is_usual(value):
        return value["text"], value.get("id")
    try:
        line = StreamLine.model_validate(value)
    except ValidationError as error:
        raise _of_line(as_invalid_request(error, StreamLine, most=1)) from None
    return line.text, line.id


def _is_usual(value: Any) -> bool:
    """Whether it is valid; told in a fifth of the time that pydantic takes."""
    if not isinstance(value, dict) or len(value) != 1 + ("id" in value):
        return False
    return isinstance(value.get("text"), str) and _is_id(value.get("id"))


def _of_line(error: errors.InvalidRequestError) -> errors.InvalidRequestError:
    return errors.InvalidRequestError(str(error).replace("the body", "the line", 1))


def _parse_large(content: bytes) -> Generator[None, None, Any]:
    """The value in a line that may hold more than a text, whose values are counted first."""
    counter = JsonValueCounter(_MAX_VALUES, _HARMLESS_BYTES)
    try:
        for start in range(0, len(content), STEP_BYTES):
            counter.feed(content[start : start + STEP_BYTES])
            yield
    except errors.InvalidRequestError:
        raise errors.InvalidRequestError(
            f"the line holds more than {_MAX_VALUES} values, or {_HARMLESS_BYTES} bytes beside "
            "them, and a text and an id are needed"
        ) from None
    try:
        return (yield from parse_large(content, StreamLine))
    except errors.InvalidRequestError as error:
        raise _of_line(error) from None


@dataclass(eq=False)
class StreamBody:
    """Reads the lines of a stream in a task of its own, `read`, while others take them.

    At most READ_AHEAD_BYTES are read ahead. `stalled_seconds` is how long the client has read
    nothing of the answer. After a second it may be one that sends its whole body first, and up to
    `max_ahead` bytes are read. If the body is longer, and the client still reads nothing after
    `patience` seconds, `given_up` is set to the error, and the rest of the body is dropped, so that
    a client that reads only after sending gets the error. `run` runs the steps of parsing lines.
    """

    receive: Receive
    lines: LineReader
    memory: StreamMemory
    stalled_seconds: Callable[[], float]
    is_closing: Callable[[], bool] | None
    run: Callable[[Generator[None, None, list[Line]]], Awaitable[list[Line]]]
    max_ahead: int
    patience: float
    given_up: errors.SmartEmbedderError | None = None
    _held: int = 0
    _complete: bool = False
    _error: errors.SmartEmbedderError | None = None
    _stopped_by: errors.SmartEmbedderError | None = None
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _taken: asyncio.Event = field(default_factory=asyncio.Event)

    async def begin(self) -> None:
        """Read the first part, and what is needed to know how the lines are read."""
        await self._read_part()
        while not (self.lines.begun or self._complete):
            await self._read_part()

    async def read(self) -> None:
        """Read to the end, then until the client leaves: raises `ClientGoneError`."""
        while not self._complete and self._error is None:
            try:
                await self._wait_for_room()
                await self._read_part()
            except errors.ClientGoneError:
                raise
            except errors.SmartEmbedderError as error:
                self._error = error
            self._arrived.set()
        # The rest is dropped, so that a client that is still sending can read the error.
        while True:
            body = (await self._receive_part()).get("body", b"")
            self.memory.release_body(len(body))

    def stop(self, error: errors.SmartEmbedderError) -> None:
        """End the body: `take` raises `error` from now on."""
        self._stopped_by = self._stopped_by or error
        self._arrived.set()

    async def take(self, max_lines: int, max_bytes: int) -> list[Line]:
        """The next lines that have arrived; empty at the end of the body.

        Raises an error of the body once the lines before it are taken.
        """
        while self._stopped_by is None:
            self._arrived.clear()
            lines = await self.run(self.lines.take(max_lines, max_bytes))
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
        message = await self._receive_part()
        body = message.get("body", b"")
        self._held += len(body)
        self.lines.feed(body)
        self._release_unused()
        if not message.get("more_body", False):
            self._complete = True
            self.lines.end()

    async def _receive_part(self) -> Message:
        message = await self.receive()
        if message["type"] == "http.disconnect":
            raise errors.ClientGoneError("the client left before its stream was complete")
        return message

    def _release_unused(self) -> None:
        unused = self._held - self.lines.buffered
        if unused > 0:
            self.memory.release_body(unused)
            self._held -= unused

    async def _wait_for_room(self) -> None:
        """Wait while enough is read ahead.

        Raises an error if the client has left, which `receive` would tell, or does not read.
        """
        max_ahead = max(self.max_ahead, READ_AHEAD_BYTES)
        while self.lines.ready:
            is_stalled = self.stalled_seconds() >= _STALLED_SECONDS
            if self.lines.buffered < (max_ahead if is_stalled else READ_AHEAD_BYTES):
                return
            self._taken.clear()
            try:
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._taken.wait()
                continue
            except TimeoutError:
                pass
            if self.is_closing is not None and self.is_closing():
                raise errors.ClientGoneError("the client left before its stream was answered")
            if self.stalled_seconds() >= self.patience:
                self.given_up = errors.AnswerNotTakenError(
                    f"the results were not read for {self.patience:g} seconds (REQUEST_TIMEOUT) "
                    f"while more than {max_ahead} bytes of lines (MAX_BODY_BYTES) waited: read "
                    "while you send, or send fewer lines in one stream"
                )
                self.stop(self.given_up)
                raise self.given_up
