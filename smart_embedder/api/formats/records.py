"""The formats of answers with vectors: which one a client prefers, and the records of a stream."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Protocol

import msgpack
import numpy as np
import orjson
from starlette.requests import Request

from smart_embedder.api.formats import arrow, binary
from smart_embedder.api.formats.binary import item_of, pack
from smart_embedder.api.formats.vectors import (
    EmbeddingAnswer,
    ModelNames,
    TextVectors,
    VectorOptions,
    render_item,
    vectors_of,
)
from smart_embedder.api.negotiation import preference, preferences
from smart_embedder.api.rendering import JSON, Chunk
from smart_embedder.engine.records import SparseVector, TextEmbedding, TokenStrings

NDJSON = "application/x-ndjson"
ARROW = "application/vnd.apache.arrow.stream"

RecordId = int | str | None


@dataclass(frozen=True, slots=True)
class Record:
    """The answer to one text: its vectors, or an error.

    Only an error that ends the stream has no id.
    """

    id: RecordId
    vectors: TextVectors | None
    warnings: list[dict[str, Any]] = field(default_factory=list)
    error: dict[str, Any] | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """The fields of the record beside vectors, as in JSON."""
        facts: dict[str, Any] = {} if self.id is None else {"id": self.id}
        if self.warnings:
            facts["warnings"] = self.warnings
        if self.error is not None:
            facts["error"] = self.error
        return facts


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """How records are written. `widths` are those of the models' dense and ColBERT vectors.

    `integer_ids` says whether every id is a number, which decides the type of Arrow's column;
    `sparse_as_indices` and `as_base64` are for JSON.
    """

    vectors: VectorOptions
    names: ModelNames
    widths: tuple[int, int]
    return_tokens: bool = False
    integer_ids: bool = False
    sparse_as_indices: bool = False
    as_base64: bool = False

    @property
    def metadata(self) -> dict[str, Any]:
        """The facts about all records, for formats with metadata."""
        return self.names.as_json() | {"output_dtype": self.vectors.dtype}


class RecordWriter(Protocol):
    """Turns records into bytes; the bytes of each call can be read without later ones."""

    def write(self, records: Sequence[Record]) -> Iterator[Chunk]:
        """The chunks of at least one record."""

    def end(self) -> bytes:
        """The bytes at the end of the stream."""


class _NdjsonWriter:
    """A line of JSON for each record."""

    def __init__(self, options: RecordOptions) -> None:
        self._options = options

    def write(self, records: Sequence[Record]) -> Iterator[Chunk]:
        for record in records:
            yield from self._line(record)

    def _line(self, record: Record) -> Iterator[bytes]:
        if record.vectors is None:
            yield orjson.dumps(record.facts)
        else:
            yield from render_item(
                record.facts,
                record.vectors,
                sparse_as_indices=self._options.sparse_as_indices,
                as_base64=self._options.as_base64,
            )
        yield b"\n"

    def end(self) -> bytes:
        return b""


class _MsgpackWriter:
    """An object for each record, one after the other."""

    def __init__(self, _options: RecordOptions) -> None:
        self._packer = msgpack.Packer()

    def write(self, records: Sequence[Record]) -> Iterator[Chunk]:
        for record in records:
            yield from pack(self._packer, self._object(record))

    def _object(self, record: Record) -> dict[str, Any]:
        if record.vectors is None:
            return record.facts
        return item_of(record.facts["id"], record.vectors) | record.facts

    def end(self) -> bytes:
        return b""


class _SafetensorsWriter:
    """Whole files, one after the other; `records` in the metadata says whose vectors are inside."""

    def __init__(self, options: RecordOptions) -> None:
        self._metadata = options.metadata

    def write(self, records: Sequence[Record]) -> Iterator[Chunk]:
        facts = [record.facts | _tokens_of(record) for record in records]
        rows = [record.vectors for record in records if record.vectors is not None]
        return binary.file_of(rows, self._metadata | {"records": facts})

    def end(self) -> bytes:
        return b""


def _tokens_of(record: Record) -> dict[str, Any]:
    tokens = record.vectors and record.vectors.tokens
    return {"tokens": tokens} if tokens else {}


class _ArrowWriter:
    """Record batches, with the columns `warnings` and `error` beside those of an answer."""

    def __init__(self, options: RecordOptions) -> None:
        self._options = options
        self._stream = arrow.ArrowStream(options.metadata)

    def write(self, records: Sequence[Record]) -> Iterator[Chunk]:
        yield from self._stream.batch_of(self._columns(records), len(records))

    def _columns(self, records: Sequence[Record]) -> dict[str, Any]:
        rows = [record.vectors or self._null for record in records]
        validity = arrow.validity_of([record.vectors for record in records])
        return {
            "id": self._ids(records),
            **arrow.vector_columns(rows, validity),
            "warnings": arrow.string_column([_as_text(record.warnings) for record in records]),
            "error": arrow.string_column([_as_text(record.error) for record in records]),
        }

    def _ids(self, records: Sequence[Record]) -> Any:
        ids = [record.id for record in records]
        if self._options.integer_ids:
            return arrow.integer_column([None if each is None else int(each) for each in ids])
        return arrow.string_column([None if each is None else str(each) for each in ids])

    @cached_property
    def _null(self) -> TextVectors:
        """The values behind a null row, which give the types of the columns."""
        return _vectors_of_nothing(self._options)

    def end(self) -> bytes:
        schema = self._stream.schema_of(self._columns([Record(None, None)]))
        return b"".join([*schema, *self._stream.close()])


def _as_text(value: Any) -> str | None:
    return orjson.dumps(value).decode() if value else None


def _vectors_of_nothing(options: RecordOptions) -> TextVectors:
    """A text's vectors of the types in the answer."""
    outputs, (dense, colbert) = options.vectors.needed, options.widths
    nothing = SparseVector(np.empty(0, np.int64), np.empty(0, np.float32))
    tokens = TokenStrings([] if outputs.sparse else None, [] if outputs.colbert else None)
    embedding = TextEmbedding(
        dense=np.eye(1, dense, dtype=np.float32)[0] if outputs.dense else None,
        sparse=nothing if outputs.sparse else None,
        colbert=np.eye(1, colbert, dtype=np.float32) if outputs.colbert else None,
    )
    return vectors_of(embedding, options.vectors, tokens if options.return_tokens else None)


# By media type; NDJSON is the default.
WRITERS: Mapping[str, Callable[[RecordOptions], RecordWriter]] = {
    NDJSON: _NdjsonWriter,
    ARROW: _ArrowWriter,
    "application/msgpack": _MsgpackWriter,
    "application/vnd.safetensors": _SafetensorsWriter,
}


SAFETENSORS = "application/vnd.safetensors"
# Renderers by media type; JSON, the default, has its own.
BINARY: Mapping[str, Callable[[EmbeddingAnswer], Iterator[Chunk]]] = {
    "application/vnd.apache.arrow.stream": arrow.render,
    "application/msgpack": binary.render_msgpack,
    SAFETENSORS: binary.render_safetensors,
}


def media_type_of(request: Request, answered: tuple[str, ...] = (JSON, *BINARY)) -> str:
    """The media type among `answered` that the request prefers; by default the first one."""
    return _preferred(preference(request.headers, "accept"), answered)


@lru_cache(maxsize=64)  # Clients send the same header with every request.
def _preferred(accept: str, answered: tuple[str, ...]) -> str:
    wanted = preferences(accept)
    named = {name: wanted[name] for name in answered if wanted.get(name)}
    return max(named, key=lambda name: named[name], default=answered[0])
