"""The body of a stream: read ahead within limits, and taken line by line."""

import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeGuard

import orjson
from pydantic import JsonValue, PlainValidator, ValidationError
from pydantic_core import PydanticCustomError

from smart_embedder import errors
from smart_embedder.api.body import JsonValueCounter, parse_large
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


class NdjsonReader:
    """A line of JSON for each text: an object with `text` and, if it has one, `id`; or a string.

    The body arrives in chunks of any size. `begun` says whether enough of it has arrived to know
    how lines are read.

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
        """The next lines: at least one, if one is ready; fewer where many are bad.

        Each step takes a few milliseconds.
        """
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
