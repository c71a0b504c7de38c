"""Reads the rows of an Arrow IPC stream: its messages, their metadata and the columns.

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
_SCHEMA, _DICTIONARY, _RECORD_BATCH = 1, 2, 3
# Numbers of the types in Schema.fbs.
_INT, _UTF8, _LARGE_UTF8 = 2, 5, 20
_INTEGERS = {(bits, True): f"<i{bits // 8}" for bits in (8, 16, 32, 64)}
_INTEGERS |= {(bits, False): f"<u{bits // 8}" for bits in (8, 16, 32)}
_MOST_COLUMNS = 2
_MOST_BUFFERS = 6
# Messages in a row that bring no row; each takes 20 us to read.
_MOST_WITHOUT_ROWS = 250
_ADVICE = (
    "send a column text of type utf8 and, where the texts have ids, a column id of utf8 or int64"
)


def _malformed(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"the body is no Arrow IPC stream that can be read: {reason}")


class _FlatTable:
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

    def _field(self, index: int) -> int:
        """The position of a field; 0 if it has its default."""
        entry = 4 + 2 * index
        offset = self._read("<H", self._vtable + entry) if entry < self._size else 0
        return self._position + offset if offset else 0

    def _target(self, position: int) -> int:
        """What the offset at `position` points to; 0 for the default of a field."""
        return position + self._read("<I", position) if position else 0

    def number(self, index: int, form: str) -> int:
        """A field that is a number, 0 by default."""
        position = self._field(index)
        return self._read(form, position) if position else 0

    def table(self, index: int) -> "_FlatTable | None":
        """A field that is a table."""
        target = self._target(self._field(index))
        return _FlatTable(self._data, target) if target else None

    def text(self, index: int) -> str:
        """A field that is a string."""
        start = self._target(self._field(index))
        length = self._read("<I", start) if start else 0
        return self._data[start + 4 : start + 4 + length].decode(errors="replace")

    def tables(self, index: int, most: int) -> Iterator["_FlatTable"]:
        """The first `most` of a field that is a list of tables."""
        start = self._target(self._field(index))
        for i in range(min(most, self._read("<I", start) if start else 0)):
            yield _FlatTable(self._data, self._target(start + 4 + 4 * i))

    def pairs(self, index: int, most: int) -> list[tuple[int, int]]:
        """The first `most` of a field that is a list of two 64-bit numbers each."""
        start = self._target(self._field(index))
        count = min(most, self._read("<I", start) if start else 0)
        return [struct.unpack_from("<qq", self._data, start + 4 + 16 * i) for i in range(count)]


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
    more than `max_batch_bytes`, which is refused before it has arrived, end the stream.
    """

    def __init__(self, max_batch_bytes: int) -> None:
        self._max_bytes = max_batch_bytes
        self._buffer = bytearray()
        # Whether the schema has arrived.
        self.begun = False
        self._columns: dict[str, _Column] = {}
        self._batch: _Rows | None = None
        # Whether the stream has said that it is complete, and whether the body has ended.
        self._complete = self._ended = False
        self._records = self._without_rows = 0

    @property
    def buffered(self) -> int:
        """Bytes that have arrived and are not taken."""
        return len(self._buffer) + (0 if self._batch is None else self._batch.bytes_left)

    @property
    def integer_ids(self) -> bool:
        """Whether ids are numbers, once the schema has arrived."""
        return "id" not in self._columns or not self._columns["id"].is_text

    @property
    def ready(self) -> bool:
        """Whether a row can be taken; raises `InvalidRequestError` for malformed bytes."""
        while self._batch is None and self._read_message():
            pass
        if self._batch is None and self._ended and self._buffer:
            raise _malformed("it ends too early")
        return self._batch is not None

    def feed(self, chunk: bytes) -> None:
        """Take the next part of the body; what follows the end of the stream is ignored."""
        if not self._complete:
            self._buffer += chunk
        if not self.begun:
            self._read_message()

    def end(self) -> None:
        """The body is complete; raises `InvalidRequestError` if it has no schema."""
        self._ended = True
        if not self.begun:
            raise _malformed("it ends too early")

    def take(self, max_lines: int, max_bytes: int) -> Generator[None, None, list[Line]]:
        """The next rows of one record batch: at least one, if one is ready."""
        lines: list[Line] = []
        if not self.ready or self._batch is None:
            return lines
        size = stepped = 0
        while self._batch.left and len(lines) < max_lines and (not lines or size < max_bytes):
            lines.append(self._batch.take(self._records))
            self._records += 1
            size += lines[-1].size
            if size - stepped >= STEP_BYTES:
                stepped = size
                yield
        if not self._batch.left:
            self._batch = None
        return lines

    def _read_message(self) -> bool:
        """Read the next message, if it has arrived."""
        try:
            begin = 0 if self._complete else self._end_of_metadata()
            is_read = bool(begin) and self._read_from(begin)
        except (struct.error, ValueError) as error:
            raise _malformed(str(error)) from None
        if is_read:
            self._without_rows = self._without_rows + 1 if self._batch is None else 0
        if self._without_rows > _MOST_WITHOUT_ROWS:
            raise _malformed(f"more than {_MOST_WITHOUT_ROWS} messages in a row have no rows")
        return is_read

    def _end_of_metadata(self) -> int:
        """Where the next message's metadata end; 0 before they have arrived."""
        is_frame = _CONTINUATION.startswith(bytes(self._buffer[: len(_CONTINUATION)]))
        if is_frame and len(self._buffer) < _FRAME.size:
            return 0
        size = _FRAME.unpack_from(self._buffer)[1] if is_frame else -1
        if not 0 <= size <= _MAX_METADATA:
            raise ValueError("send the stream format, as pyarrow.ipc.new_stream writes it")
        if not size:
            self._complete = True
            self._buffer.clear()
        end = _FRAME.size + size
        return end if len(self._buffer) >= end else 0

    def _read_from(self, begin: int) -> bool:
        """Read the message whose body begins there, if it has arrived."""
        metadata = bytes(self._buffer[_FRAME.size : begin])
        message = _FlatTable(metadata, int.from_bytes(metadata[:4], "little"))
        header, kind, length = message.table(2), message.number(1, "<B"), message.number(3, "<q")
        if length > self._max_bytes:
            raise too_large("record batch", self._max_bytes)
        if length < 0:
            raise ValueError("a body has a negative length")
        if len(self._buffer) < begin + length:
            return False
        with memoryview(self._buffer) as buffer:
            body = bytes(buffer[begin : begin + length])
        del self._buffer[: begin + length]
        if header is None:
            raise ValueError("a message has no header")
        if kind == _SCHEMA:
            self._columns, self.begun = _columns_of(header), True
        elif kind == _RECORD_BATCH and self.begun:
            rows = _Rows(header, memoryview(body), self._columns)
            self._batch = rows if rows.left else None
        elif kind == _DICTIONARY:
            raise InvalidRequestError(f"dictionaries of Arrow are not read here: {_ADVICE}")
        else:
            raise ValueError("a message is neither a schema nor a record batch")
        return True


def _columns_of(schema: _FlatTable) -> dict[str, _Column]:
    columns: dict[str, _Column] = {}
    wrong = InvalidRequestError(f"the Arrow stream has other columns than can be read: {_ADVICE}")
    first = 0
    if schema.number(0, "<h"):
        raise InvalidRequestError("the Arrow stream is big-endian: write it little-endian")
    for field in schema.tables(1, _MOST_COLUMNS + 1):
        name, kind = field.text(0), field.number(2, "<B")
        about = field.table(3)
        if name not in {"text", "id"} or name in columns or field.table(4) or about is None:
            raise wrong
        is_text = kind in {_UTF8, _LARGE_UTF8}
        if is_text:
            dtype = "<i4" if kind == _UTF8 else "<i8"
        else:
            key = about.number(0, "<i"), bool(about.number(1, "<B"))
            if kind != _INT or key not in _INTEGERS or name == "text":
                raise wrong
            dtype = _INTEGERS[key]
        columns[name] = _Column(len(columns), first, dtype, is_text)
        first += 3 if is_text else 2
    if "text" not in columns:
        raise wrong
    return columns


class _Rows:
    """One record batch, and how far it has been taken; raises `ValueError` for what is short."""

    def __init__(self, batch: _FlatTable, body: memoryview, columns: dict[str, _Column]) -> None:
        if batch.table(3) is not None:
            raise InvalidRequestError(
                "the record batches are compressed: write them uncompressed, and compress the "
                "whole body with Content-Encoding: gzip"
            )
        count = batch.number(0, "<q")
        if count < 0:
            raise ValueError("a record batch has fewer than no rows")
        buffers = [
            body[start : start + length] if start >= 0 and length >= 0 else None
            for start, length in batch.pairs(2, _MOST_BUFFERS)
        ]
        values = {name: _Values(each, batch, buffers, count) for name, each in columns.items()}
        self._texts, self._ids = values["text"], values.get("id")
        self._count, self._taken = count, 0
        self._bytes_of_a_row = len(body) / max(count, 1)

    @property
    def left(self) -> int:
        """Rows that are not taken."""
        return self._count - self._taken

    @property
    def bytes_left(self) -> int:
        """Approximately their bytes."""
        return int(self.left * self._bytes_of_a_row)

    def take(self, index: int) -> Line:
        """The next row, which is the record of this index."""
        row, self._taken = self._taken, self._taken + 1
        size = sum(each.nbytes(row) for each in (self._ids, self._texts) if each)
        name: int | str = index
        message = "the field text is null: send a string"
        try:
            own = None if self._ids is None else self._ids.get(row)
            name = index if own is None else own
            text = self._texts.get(row)
        except UnicodeDecodeError:
            text, message = None, "the row is not UTF-8: send text in Unicode"
        if isinstance(text, str):
            return Line(index + 1, name, size, text)
        return Line(index + 1, name, size, error=InvalidRequestError(message))


class _Values:
    """The values of one column of a record batch; raises `ValueError` for short buffers."""

    def __init__(
        self, column: _Column, batch: _FlatTable, buffers: list[memoryview | None], count: int
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
        self._numbers = offsets = np.frombuffer(numbers, column.dtype, length)
        if count and self._data is not None:
            falls = (offsets[1:] < offsets[:-1]).any()
            if falls or offsets[0] < 0 or offsets[-1] > len(self._data):
                raise ValueError("the offsets of a column do not fit its data")
        # As Arrow's own libraries read it: what the bits say counts only where there are nulls.
        self._valid: npt.NDArray[Any] | None = None
        if nodes[0][1] and validity:
            if count > 8 * len(validity):
                raise ValueError("a buffer is too short")
            bits = np.frombuffer(validity, np.uint8)
            self._valid = np.unpackbits(bits, count=count, bitorder="little")

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
