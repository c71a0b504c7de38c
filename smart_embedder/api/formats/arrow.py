"""Vectors as an Arrow IPC stream: one row for each text, in record batches of about a megabyte.

nanoarrow (3 MB, where pyarrow takes 170) writes the metadata. It would copy the vectors into a
buffer that it reuses; they are sent from their own memory instead.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain
from typing import Any

import nanoarrow as na
import numpy as np
import numpy.typing as npt
import orjson
from nanoarrow.c_array_stream import CArrayStream
from nanoarrow.ipc import StreamWriter

from smart_embedder.api.formats.vectors import METADATA_KEY, EmbeddingAnswer, TextVectors
from smart_embedder.api.rendering import Chunk
from smart_embedder.vectors import scales_of

BATCH_BYTES = 1 << 20
_ALIGNMENT = 8
# A larger buffer is sent without a copy.
_COPIED_BYTES = 1 << 16

_WEIGHT = na.struct({"index": na.uint32(), "value": na.float32()})


# Cached: making them takes half of the time of a batch.
@cache
def _type(name: str, width: int | None = None, *, listed: bool = False) -> Any:
    """A type by its name, which numpy and nanoarrow share; lists of `width`, or of any size."""
    kind = _WEIGHT if name == "weight" else getattr(na, name)()
    kind = kind if width is None else na.fixed_size_list(kind, width)
    return na.c_schema(na.list_(kind) if listed else kind)


@dataclass(frozen=True, slots=True)
class Column:
    """An array of Arrow, and its buffers in the order in which they are sent."""

    array: Any
    buffers: tuple[Any, ...]


class ArrowStream:
    """Writes record batches with the columns of the first one.

    `metadata` is stored in the schema under `METADATA_KEY`, as JSON.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = {METADATA_KEY: orjson.dumps(metadata)}
        self._chunks: list[Chunk] = []
        # The body of the record batch that is being written, which is not copied.
        self._body: list[Chunk] | None = None
        self._wrote_header = False
        self._writer = StreamWriter.from_writable(self)
        self._schema: Any = None

    def write(self, data: Any) -> int:
        """Receive what the writer writes, in a buffer that it reuses: a header, then its body."""
        if self._body is not None and self._wrote_header:
            self._chunks += self._body
        else:
            self._chunks.append(bytes(data))
        self._wrote_header = True
        return len(data)

    def batch_of(self, columns: Mapping[str, Column], rows: int) -> list[Chunk]:
        """The bytes of one record batch, after those of the schema for the first one.

        `columns` have `rows` rows each, and the types of the first batch.
        """
        self._begin(columns)
        row_batch = _column(self._schema, rows, [None], list(columns.values()))
        self._body, self._wrote_header = _body(row_batch.buffers), False
        self._writer.write_array(row_batch.array)
        self._body = None
        return self._take()

    def schema_of(self, columns: Mapping[str, Column]) -> list[Chunk]:
        """The bytes of the schema, if it is not written yet."""
        self._begin(columns)
        return self._take()

    def _begin(self, columns: Mapping[str, Column]) -> None:
        if self._schema is None:
            types = {name: column.array.schema for name, column in columns.items()}
            schema = na.Schema(na.struct(types), metadata=self._metadata)
            self._schema = na.c_schema(schema)
            self._writer.write_stream(CArrayStream.from_c_arrays([], self._schema))

    def close(self) -> list[Chunk]:
        """The bytes at the end of the stream."""
        self._writer.close()
        return self._take()

    def _take(self) -> list[Chunk]:
        chunks, self._chunks = self._chunks, []
        return chunks


def render(answer: EmbeddingAnswer) -> Iterator[Chunk]:
    """The chunks of the stream."""
    stream = ArrowStream(answer.report())
    rows: list[TextVectors] = []
    size = 0
    for end, row in enumerate(answer.vectors(), 1):
        rows.append(row)
        size += row.nbytes
        if size >= BATCH_BYTES or end == len(answer.request.texts):
            ids = _flat(np.arange(end - len(rows), end))
            yield from stream.batch_of({"id": ids} | vector_columns(rows), len(rows))
            size, rows = 0, []
    yield from stream.close()


def _column(
    kind: Any, length: int, buffers: Sequence[Any], children: Sequence[Column] = ()
) -> Column:
    """An array; None among `buffers` is the validity bitmap of a column without nulls."""
    arrays = [child.array for child in children]
    array = na.c_array_from_buffers(kind, length, buffers, children=arrays)
    inner = chain.from_iterable(child.buffers for child in children)
    return Column(array, (*(each for each in buffers if each is not None), *inner))


def _body(buffers: Iterable[Any]) -> list[Chunk]:
    """The body of a record batch's message: every buffer, padded; large ones are not copied."""
    chunks: list[Chunk] = []
    small = bytearray()
    for buffer in buffers:
        content = np.frombuffer(buffer, np.uint8).data
        if content.nbytes < _COPIED_BYTES:
            small += content
        else:
            chunks += [bytes(small), content]
            small.clear()
        small += bytes(-content.nbytes % _ALIGNMENT)
    return [chunk for chunk in (*chunks, bytes(small)) if chunk]


def vector_columns(rows: Sequence[TextVectors], validity: bytes | None = None) -> dict[str, Column]:
    """The columns of the vectors; a row whose bit in `validity` is not set is null in each."""
    columns: dict[str, Column] = {}
    dense = [row.dense for row in rows if row.dense is not None]
    if dense:
        columns["dense"] = _vectors(np.stack([each.values for each in dense]), validity)
        if (scales := scales_of(dense)) is not None:
            columns["dense_scale"] = _flat(scales, validity)
    sparse = [row.sparse for row in rows if row.sparse is not None]
    if sparse:
        sizes = [len(each.values) for each in sparse]
        indices = _flat(_joined([each.indices for each in sparse]).astype(np.uint32))
        values = _flat(_joined([each.values for each in sparse]))
        pairs = _column(_type("weight"), sum(sizes), [None], [indices, values])
        columns["sparse"] = _lists(_type("weight", listed=True), sizes, pairs, validity)
    colbert = [row.colbert for row in rows if row.colbert is not None]
    if colbert:
        sizes = [len(each.values) for each in colbert]
        matrix = _joined([each.values for each in colbert])
        kind = _type(matrix.dtype.name, matrix.shape[1], listed=True)
        columns["colbert"] = _lists(kind, sizes, _vectors(matrix), validity)
        if (scales := scales_of(colbert)) is not None:
            kind = _type("float32", listed=True)
            columns["colbert_scale"] = _lists(kind, sizes, _flat(scales), validity)
    muvera = [row.muvera for row in rows if row.muvera is not None]
    if muvera:
        columns["muvera"] = _vectors(np.stack(muvera), validity)
    tokens = [row.tokens for row in rows if row.tokens is not None]
    for name in ("sparse", "colbert"):
        lists = [strings for each in tokens if (strings := getattr(each, name)) is not None]
        if lists:
            items = string_column([text for texts in lists for text in texts])
            kind, sizes = _type("string", listed=True), list(map(len, lists))
            columns[f"{name}_tokens"] = _lists(kind, sizes, items, validity)
    return columns


def _flat(values: npt.NDArray[Any], validity: bytes | None = None) -> Column:
    buffers = [validity, np.ascontiguousarray(values)]
    return _column(_type(values.dtype.name), len(values), buffers)


def _vectors(matrix: npt.NDArray[Any], validity: bytes | None = None) -> Column:
    """A fixed-size list for each row of `[rows, width]`."""
    rows, width = matrix.shape
    return _column(_type(matrix.dtype.name, width), rows, [validity], [_flat(matrix.reshape(-1))])


def _lists(kind: Any, sizes: Sequence[int], items: Column, validity: bytes | None) -> Column:
    """A list column: for each size a list of that many of the `items`."""
    return _column(kind, len(sizes), [validity, _offsets(sizes)], [items])


def _offsets(sizes: Iterable[int]) -> npt.NDArray[np.int32]:
    return np.fromiter(accumulate(sizes, initial=0), np.int32)


def integer_column(numbers: Sequence[int | None]) -> Column:
    """A column of 64-bit integers; None is null."""
    return _flat(np.array([number or 0 for number in numbers], np.int64), validity_of(numbers))


def string_column(texts: Sequence[str | None]) -> Column:
    """A column of strings; None is null."""
    encoded = [(text or "").encode() for text in texts]
    # The writer announces no offsets where there is nothing for them to point at.
    offsets = _offsets(map(len, encoded)) if encoded else b""
    buffers = [validity_of(texts), offsets, b"".join(encoded)]
    return _column(_type("string"), len(encoded), buffers)


def validity_of(values: Sequence[object | None]) -> bytes | None:
    """The validity bitmap, a bit for each value; None if no value is None."""
    present = [value is not None for value in values]
    return None if all(present) else np.packbits(present, bitorder="little").tobytes()


def _joined(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Concatenate, without a copy of a single part."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
