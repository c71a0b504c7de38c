"""Parses the messages of an Arrow IPC stream and their metadata.

nanoarrow parses them, too, but crashes on some malformed ones, which any client could send. Here
Python checks every offset. Sources: the frame at
https://arrow.apache.org/docs/format/Columnar.html#encapsulated-message-format, the tables in
format/Message.fbs and format/Schema.fbs of apache/arrow, and flatbuffers' internals.
"""

import struct
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from smart_embedder.api.stream.lines import STEP_BYTES, Line, too_large
from smart_embedder.errors import InvalidRequestError

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


_ADVICE = (
    "send a column text of type utf8 and, where the texts have ids, a column id of utf8 or int64"
)
# Numbers of the types in Schema.fbs.
_INT, _UTF8, _LARGE_UTF8 = 2, 5, 20
_INTEGERS = {(bits, True): f"<i{bits // 8}" for bits in (8, 16, 32, 64)}
_INTEGERS |= {(bits, False): f"<u{bits // 8}" for bits in (8, 16, 32)}
_MOST_COLUMNS = 2
_MOST_BUFFERS = 6
# Messages in a row that bring no row; each takes 20 us to read.
_MOST_WITHOUT_ROWS = 250


@dataclass(frozen=True, slots=True)
class _Column:
    """A column: `node` and `first` are the indices of its field node and of its first buffer.

    `dtype` is that of its offsets or numbers.
    """

    node: int
    first: int
    dtype: str
    is_text: bool


class ArrowReader:
    """Rows with `text` and, where there is such a column, `id`.

    A bad row becomes an error in its place. Bytes that are no Arrow stream, and a record batch of
    more than `max_batch_bytes`, end the stream.
    """

    def __init__(self, max_batch_bytes: int) -> None:
        self._messages = MessageBuffer(max_batch_bytes)
        self._columns: dict[str, _Column] | None = None
        self._batch: _Rows | None = None
        self._ended = False
        self._records = 0
        self._without_rows = 0

    @property
    def buffered(self) -> int:
        """Bytes that have arrived and are not taken."""
        return len(self._messages) + (0 if self._batch is None else self._batch.bytes_left)

    @property
    def begun(self) -> bool:
        """Whether the schema has arrived."""
        return self._columns is not None

    @property
    def integer_ids(self) -> bool:
        """Whether ids are numbers, once the schema has arrived."""
        columns = self._columns or {}
        return "id" not in columns or not columns["id"].is_text

    @property
    def ready(self) -> bool:
        """Whether a row can be taken; raises `InvalidRequestError` for malformed bytes."""
        while self._batch is None and (message := self._messages.take()) is not None:
            self._read(message)
        if self._batch is None and self._ended and len(self._messages):
            raise malformed("it ends too early")
        return self._batch is not None

    def feed(self, chunk: bytes) -> None:
        """Take the next part of the body."""
        self._messages.feed(chunk)
        if self._columns is None and (message := self._messages.take()) is not None:
            self._read(message)

    def end(self) -> None:
        """The body is complete; raises `InvalidRequestError` if it has no schema."""
        self._ended = True
        if self._columns is None:
            raise malformed("it ends too early")

    def take(self, max_lines: int, max_bytes: int) -> Generator[None, None, list[Line]]:
        """The next rows: at least one, if one is ready."""
        if not self.ready or self._batch is None:
            return []
        lines = yield from self._batch.take(max_lines, max_bytes, self._records)
        self._records += len(lines)
        if not self._batch.left:
            self._batch = None
        return lines

    def _read(self, message: Message) -> None:
        try:
            if message.kind == SCHEMA:
                self._columns = _columns_of(message.header)
            elif message.kind == RECORD_BATCH and self._columns is not None:
                rows = _Rows(message, self._columns)
                self._batch = rows if rows.left else None
            elif message.kind == DICTIONARY:
                raise InvalidRequestError(f"dictionaries of Arrow are not read here: {_ADVICE}")
            else:
                raise malformed("a message is neither a schema nor a record batch")
        except (struct.error, ValueError) as error:
            raise malformed(str(error)) from None
        self._without_rows = self._without_rows + 1 if self._batch is None else 0
        if self._without_rows > _MOST_WITHOUT_ROWS:
            raise malformed(f"more than {_MOST_WITHOUT_ROWS} messages in a row have no rows")


def _columns_of(schema: FlatTable) -> dict[str, _Column]:
    columns: dict[str, _Column] = {}
    first = 0
    if schema.number(0, "<h"):
        raise InvalidRequestError("the Arrow stream is big-endian: write it little-endian")
    for field in schema.tables(1, _MOST_COLUMNS + 1):
        name, kind = field.text(0), field.number(2, "<B")
        about = field.table(3)
        if name not in {"text", "id"} or name in columns or field.table(4) or about is None:
            raise _wrong_columns()
        if kind in {_UTF8, _LARGE_UTF8}:
            dtype = "<i4" if kind == _UTF8 else "<i8"
            columns[name] = _Column(len(columns), first, dtype, is_text=True)
            first += 3
            continue
        key = about.number(0, "<i"), bool(about.number(1, "<B"))
        if kind != _INT or key not in _INTEGERS or name == "text":
            raise _wrong_columns()
        columns[name] = _Column(len(columns), first, _INTEGERS[key], is_text=False)
        first += 2
    if "text" not in columns:
        raise _wrong_columns()
    return columns


def _wrong_columns() -> InvalidRequestError:
    return InvalidRequestError(f"the Arrow stream has other columns than can be read: {_ADVICE}")


class _Rows:
    """One record batch, and how far it has been taken."""

    def __init__(self, message: Message, columns: dict[str, _Column]) -> None:
        if message.header.table(3) is not None:
            raise InvalidRequestError(
                "the record batches are compressed: write them uncompressed, and compress the "
                "whole body with Content-Encoding: gzip"
            )
        self._count = message.header.number(0, "<q")
        if self._count < 0:
            raise ValueError("a record batch has fewer than no rows")
        buffers = [
            message.body[start : start + length] if start >= 0 and length >= 0 else None
            for start, length in message.header.pairs(2, _MOST_BUFFERS)
        ]
        values = {
            name: _Values(column, message.header, buffers, self._count)
            for name, column in columns.items()
        }
        self._texts, self._ids = values["text"], values.get("id")
        self._taken = 0
        self._bytes_of_a_row = len(message.body) / max(self._count, 1)

    @property
    def left(self) -> int:
        """Rows that are not taken."""
        return self._count - self._taken

    @property
    def bytes_left(self) -> int:
        """Approximately their bytes."""
        return int(self.left * self._bytes_of_a_row)

    def take(
        self, max_lines: int, max_bytes: int, records: int
    ) -> Generator[None, None, list[Line]]:
        """The next rows; `records` is the number of records before them."""
        lines: list[Line] = []
        size = stepped = 0
        while self.left and len(lines) < max_lines and (not lines or size < max_bytes):
            lines.append(self._line(records + len(lines)))
            size += lines[-1].size
            self._taken += 1
            if size - stepped >= STEP_BYTES:
                stepped = size
                yield
        return lines

    def _line(self, index: int) -> Line:
        name: int | str = index
        size = sum(each.nbytes(self._taken) for each in (self._ids, self._texts) if each)
        try:
            own = None if self._ids is None else self._ids.get(self._taken)
            name = index if own is None else own
            text = self._texts.get(self._taken)
        except UnicodeDecodeError:
            error = InvalidRequestError("the row is not UTF-8: send text in Unicode")
            return Line(index + 1, name, size, error=error)
        if isinstance(text, str):
            return Line(index + 1, name, size, text)
        error = InvalidRequestError("the field text is null: send a string")
        return Line(index + 1, name, size, error=error)


class _Values:
    """The values of one column of a record batch; raises `ValueError` for short buffers."""

    def __init__(
        self,
        column: _Column,
        batch: FlatTable,
        buffers: list[memoryview | None],
        count: int,
    ) -> None:
        nodes = batch.pairs(1, column.node + 1)[column.node :]
        if [length for length, _ in nodes] != [count]:
            raise ValueError("a column has another number of rows than its batch")
        validity, numbers, *rest = buffers[column.first : column.first + 2 + column.is_text]
        if numbers is None or (column.is_text and not rest):
            raise ValueError("a buffer is missing")
        self._data = rest[0] if column.is_text else None
        # An empty column may have no offsets.
        length = count + column.is_text if count else 0
        self._numbers = np.frombuffer(numbers, column.dtype, length)
        if count and self._data is not None:
            _check_offsets(self._numbers, len(self._data))
        # As Arrow's own libraries read it: what the bits say counts only where there are nulls.
        self._valid = _bits(validity, count) if nodes[0][1] else None

    def get(self, row: int) -> int | str | None:
        """A value; raises `UnicodeDecodeError`."""
        if self._valid is not None and not self._valid[row]:
            return None
        if self._data is None:
            return int(self._numbers[row])
        return str(self._data[self._numbers[row] : self._numbers[row + 1]], "utf-8")

    def nbytes(self, row: int) -> int:
        """The bytes that a value takes of the body: its number, or its offset and its text."""
        if self._data is None:
            return self._numbers.itemsize
        return self._numbers.itemsize + int(self._numbers[row + 1] - self._numbers[row])


def _check_offsets(offsets: npt.NDArray[Any], size: int) -> None:
    if offsets[0] < 0 or offsets[-1] > size or (offsets[1:] < offsets[:-1]).any():
        raise ValueError("the offsets of a column do not fit its data")


def _bits(validity: memoryview | None, count: int) -> npt.NDArray[np.uint8] | None:
    if validity is None or not len(validity):
        return None
    if count > 8 * len(validity):
        raise ValueError("a buffer is too short")
    return np.unpackbits(np.frombuffer(validity, np.uint8), count=count, bitorder="little")
