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
from smart_embedder.engine.records import SparseVector
from smart_embedder.vectors import scales_of

BATCH_BYTES = 1 << 20
_ALIGNMENT = 8
# A larger buffer is sent without a copy.
_COPIED_BYTES = 1 << 16

_TYPES = {
    "float32": na.float32(),
    "float16": na.float16(),
    "int8": na.int8(),
    "uint8": na.uint8(),
    "uint16": na.uint16(),
    "uint32": na.uint32(),
    "int64": na.int64(),
    "string": na.string(),
}


# Cached: making them takes half of the time of a batch.
@cache
def _type(name: str) -> Any:
    return na.c_schema(_TYPES[name])


@cache
def _vector_type(name: str, width: int) -> Any:
    return na.c_schema(na.fixed_size_list(_TYPES[name], width))


@cache
def _list_type(name: str, width: int | None = None) -> Any:
    kind = _TYPES[name]
    return na.c_schema(na.list_(kind if width is None else na.fixed_size_list(kind, width)))


_WEIGHT = na.struct({"index": na.uint32(), "value": na.float32()})


@cache
def _weight_types() -> tuple[Any, Any]:
    """The types of a sparse weight and of a list of them."""
    return na.c_schema(_WEIGHT), na.c_schema(na.list_(_WEIGHT))


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

    def batch(self, first_id: int, rows: Sequence[TextVectors]) -> list[Chunk]:
        """The bytes of one record batch; the first one follows the schema."""
        ids = _flat(np.arange(first_id, first_id + len(rows)))
        return self.batch_of({"id": ids} | vector_columns(rows), len(rows))

    def batch_of(self, columns: Mapping[str, Column], rows: int) -> list[Chunk]:
        """The same from `columns` of `rows` rows each, with the types of the first batch."""
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
    stream = ArrowStream(answer.typed_report())
    rows: list[TextVectors] = []
    size = begin = 0
    for row in answer.vectors():
        rows.append(row)
        size += row.nbytes
        if size >= BATCH_BYTES:
            yield from stream.batch(begin, rows)
            begin, size, rows = begin + len(rows), 0, []
    if rows:
        yield from stream.batch(begin, rows)
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
    return {name: column for name, column in _columns(rows, validity) if column is not None}


def _columns(
    rows: Sequence[TextVectors], validity: bytes | None
) -> Iterator[tuple[str, Column | None]]:
    """Each column of the batch by name; None for one that the answer does not have."""
    dense = [row.dense for row in rows if row.dense is not None]
    if dense:
        yield "dense", _vectors(np.stack([each.values for each in dense]), validity)
        scales = scales_of(dense)
        yield "dense_scale", None if scales is None else _flat(scales, validity)
    if rows[0].sparse is not None:
        yield "sparse", _sparse([row.sparse for row in rows if row.sparse is not None], validity)
    colbert = [row.colbert for row in rows if row.colbert is not None]
    if colbert:
        sizes = [len(each.values) for each in colbert]
        matrix, scales = _joined([each.values for each in colbert]), scales_of(colbert)
        kind = _list_type(matrix.dtype.name, matrix.shape[1])
        yield "colbert", _lists(kind, sizes, _vectors(matrix), validity)
        if scales is not None:
            kind = _list_type("float32")
            yield "colbert_scale", _lists(kind, sizes, _flat(scales), validity)
    muvera = [row.muvera for row in rows if row.muvera is not None]
    if muvera:
        yield "muvera", _vectors(np.stack(muvera), validity)
    if rows[0].tokens is not None:
        for kind in ("sparse", "colbert"):
            names = [getattr(row.tokens, kind) for row in rows]
            yield f"{kind}_tokens", None if names[0] is None else _string_lists(names, validity)


def _flat(values: npt.NDArray[Any], validity: bytes | None = None) -> Column:
    buffers = [validity, np.ascontiguousarray(values)]
    return _column(_type(values.dtype.name), len(values), buffers)


def _vectors(matrix: npt.NDArray[Any], validity: bytes | None = None) -> Column:
    """A fixed-size list for each row of `[rows, width]`."""
    rows, width = matrix.shape
    kind = _vector_type(matrix.dtype.name, width)
    return _column(kind, rows, [validity], [_flat(matrix.reshape(-1))])


def _lists(kind: Any, sizes: Sequence[int], items: Column, validity: bytes | None) -> Column:
    """A list column: for each size a list of that many of the `items`."""
    buffers = [validity, _offsets(sizes)]
    return _column(kind, len(sizes), buffers, [items])


def _offsets(sizes: Iterable[int]) -> npt.NDArray[np.int32]:
    return np.fromiter(accumulate(sizes, initial=0), np.int32)


def _sparse(vectors: Sequence[SparseVector], validity: bytes | None) -> Column:
    sizes = [len(each.values) for each in vectors]
    weight, weights = _weight_types()
    indices = _flat(_joined([each.indices for each in vectors]).astype(np.uint32))
    values = _flat(_joined([each.values for each in vectors]))
    pairs = _column(weight, sum(sizes), [None], [indices, values])
    return _lists(weights, sizes, pairs, validity)


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


def _string_lists(lists: Sequence[list[str]], validity: bytes | None) -> Column:
    items = string_column([text for texts in lists for text in texts])
    return _lists(_list_type("string"), [len(texts) for texts in lists], items, validity)


def _joined(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Concatenate, without a copy of a single part."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
