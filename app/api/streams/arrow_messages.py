"""Parses the messages of an Arrow IPC stream and their metadata.

nanoarrow parses them, too, but crashes on some malformed ones, which any client could send. Here
Python checks every offset. Sources: the frame at
https://arrow.apache.org/docs/format/Columnar.html#encapsulated-message-format, the tables in
format/Message.fbs and format/Schema.fbs of apache/arrow, and flatbuffers' internals.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from app.api.streams.lines import too_large
from app.errors import InvalidRequestError

_CONTINUATION = b"\xff\xff\xff\xff"
# The continuation, and the size of the metadata.
_FRAME = struct.Struct("<4si")
# Two columns take some hundred bytes.
_MAX_METADATA = 1 << 20
SCHEMA, DICTIONARY, RECORD_BATCH = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Message:
    """One message: `kind` says what the table `header` is, `body` holds the buffers."""

    kind: int
    header: "FlatTable"
    body: memoryview


class FlatTable:
    """A table of a flatbuffer; reading outside the buffer raises `struct.error`."""

    def __init__(self, data: bytes, position: int) -> None:
        self._data = data
        self._position = position
        self._vtable = position - self._read("<i", position)
        self._size = self._read("<H", self._vtable)

    def _read(self, form: str, position: int) -> int:
        if position < 0:
            raise struct.error("an offset points before the buffer")
        value: int = struct.unpack_from(form, self._data, position)[0]
        return value

    def _field_position(self, index: int) -> int | None:
        """The position of a field; None if it has its default."""
        entry = 4 + 2 * index
        offset = self._read("<H", self._vtable + entry) if entry < self._size else 0
        return self._position + offset if offset else None

    def number(self, index: int, form: str) -> int:
        """A field that is a number, 0 by default."""
        position = self._field_position(index)
        return 0 if position is None else self._read(form, position)

    def table(self, index: int) -> "FlatTable | None":
        """A field that is a table."""
        position = self._field_position(index)
        return None if position is None else FlatTable(self._data, self._target(position))

    def text(self, index: int) -> str:
        """A field that is a string."""
        position = self._field_position(index)
        if position is None:
            return ""
        start = self._target(position)
        length = self._read("<I", start)
        return self._data[start + 4 : start + 4 + length].decode(errors="replace")

    def tables(self, index: int, most: int) -> Iterator["FlatTable"]:
        """The first `most` of a field that is a list of tables."""
        position = self._field_position(index)
        start = 0 if position is None else self._target(position)
        for i in range(min(most, self._read("<I", start) if start else 0)):
            yield FlatTable(self._data, self._target(start + 4 + 4 * i))

    def pairs(self, index: int, most: int) -> list[tuple[int, int]]:
        """The first `most` of a field that is a list of two 64-bit numbers each."""
        position = self._field_position(index)
        start = 0 if position is None else self._target(position)
        count = min(most, self._read("<I", start) if start else 0)
        return [struct.unpack_from("<qq", self._data, start + 4 + 16 * i) for i in range(count)]

    def _target(self, position: int) -> int:
        return position + self._read("<I", position)


class MessageBuffer:
    """Splits a stream, which arrives in chunks of any size, into messages.

    A message with a body of more than `max_bytes` is refused before it has arrived.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self.complete = False

    def __len__(self) -> int:
        return len(self._buffer)

    def feed(self, chunk: bytes) -> None:
        """Take the next part; what follows the end of the stream is ignored."""
        if not self.complete:
            self._buffer += chunk

    def take(self) -> Message | None:
        """The next message, if it has arrived; raises `InvalidRequestError` for malformed bytes."""
        if self.complete:
            return None
        is_frame = _CONTINUATION.startswith(bytes(self._buffer[: len(_CONTINUATION)]))
        if is_frame and len(self._buffer) < _FRAME.size:
            return None
        size = _FRAME.unpack_from(self._buffer)[1] if is_frame else -1
        if not 0 <= size <= _MAX_METADATA:
            raise malformed("send the stream format, as pyarrow.ipc.new_stream writes it")
        if not size:
            self.complete = True
            self._buffer.clear()
            return None
        begin = _FRAME.size + size
        if len(self._buffer) < begin:
            return None
        try:
            return self._cut(bytes(self._buffer[_FRAME.size : begin]), begin)
        except struct.error as error:
            raise malformed(str(error)) from None

    def _cut(self, metadata: bytes, begin: int) -> Message | None:
        message = FlatTable(metadata, int.from_bytes(metadata[:4], "little"))
        length = message.number(3, "<q")
        if length > self._max_bytes:
            raise too_large("record batch", self._max_bytes)
        if length < 0:
            raise malformed("a body has a negative length")
        if len(self._buffer) < begin + length:
            return None
        header = message.table(2)
        if header is None:
            raise malformed("a message has no header")
        with memoryview(self._buffer) as buffer:
            body = bytes(buffer[begin : begin + length])
        del self._buffer[: begin + length]
        return Message(message.number(1, "<B"), header, memoryview(body))


def malformed(reason: str) -> InvalidRequestError:
    """The error for what is no Arrow stream."""
    return InvalidRequestError(f"the body is no Arrow IPC stream that can be read: {reason}")
