"""The formats of answers with vectors: which one a client prefers, and the records of a stream."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgpack
import numpy as np
import orjson
from starlette.requests import Request

from smart_embedder.api.context import preference, preferred
from smart_embedder.api.formats import arrow, binary
from smart_embedder.api.formats.binary import item_of, pack
from smart_embedder.api.formats.vectors import EmbeddingAnswer, TextVectors, render_item, vectors_of
from smart_embedder.api.rendering import JSON, Chunk
from smart_embedder.engine.records import EmbedRequest, SparseVector, TextEmbedding, TokenStrings

NDJSON = "application/x-ndjson"
ARROW = "application/vnd.apache.arrow.stream"
MSGPACK = "application/msgpack"
SAFETENSORS = "application/vnd.safetensors"

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

    request: EmbedRequest
    made_by: Mapping[str, Any]
    widths: tuple[int, int]
    integer_ids: bool = False
    sparse_as_indices: bool = False
    as_base64: bool = False

    @property
    def metadata(self) -> dict[str, Any]:
        """The facts about all records, for formats with metadata."""
        return {**self.made_by, "output_dtype": self.request.output_dtype}


class RecordWriter:
    """Turns records into bytes; the bytes of each call can be read without later ones.

    This one writes a line of JSON for each record, the others their formats.
    """

    def __init__(self, options: RecordOptions) -> None:
        self._options = options

    def write(self, records: Sequence[Record]) -> Iterator[Chunk]:
        """The chunks of at least one record."""
        for record in records:
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
        """The bytes at the end of the stream."""
        return b""


class _MsgpackWriter(RecordWriter):
    """An object for each record, one after the other."""

    def write(self, records: Sequence[Record]) -> Iterator[Chunk]:
        packer = msgpack.Packer()
        for record in records:
            facts, vectors = record.facts, record.vectors
            item = facts if vectors is None else item_of(facts["id"], vectors) | facts
            yield from pack(packer, item)


class _SafetensorsWriter(RecordWriter):
    """Whole files, one after the other; `records` in the metadata says whose vectors are inside."""

    def write(self, records: Sequence[Record]) -> Iterator[Chunk]:
        rows = [record.vectors for record in records if record.vectors is not None]
        told = []
        for record in records:
            tokens = record.vectors and record.vectors.tokens
            told.append(record.facts | ({"tokens": tokens} if tokens else {}))
        return binary.file_of(rows, self._options.metadata | {"records": told})


class _ArrowWriter(RecordWriter):
    """Record batches, with the columns `warnings` and `error` beside those of an answer."""

    def __init__(self, options: RecordOptions) -> None:
        super().__init__(options)
        self._stream = arrow.ArrowStream(options.metadata)

    def write(self, records: Sequence[Record]) -> Iterator[Chunk]:
        yield from self._stream.batch_of(self._columns(records), len(records))

    def _columns(self, records: Sequence[Record]) -> dict[str, Any]:
        rows = [record.vectors or self._null for record in records]
        validity = arrow.validity_of([record.vectors for record in records])
        ids: list[Any] = [record.id for record in records]
        if not self._options.integer_ids:
            ids = [None if each is None else str(each) for each in ids]
        column = arrow.integer_column if self._options.integer_ids else arrow.string_column
        return {
            "id": column(ids),
            **arrow.vector_columns(rows, validity),
            "warnings": arrow.string_column([_as_text(record.warnings) for record in records]),
            "error": arrow.string_column([_as_text(record.error) for record in records]),
        }

    @cached_property
    def _null(self) -> TextVectors:
        """The values behind a null row, which give the types of the columns."""
        request = self._options.request
        outputs, (dense, colbert) = request.needed, self._options.widths
        nothing = SparseVector(np.empty(0, np.int64), np.empty(0, np.float32))
        tokens = TokenStrings([] if outputs.sparse else None, [] if outputs.colbert else None)
        embedding = TextEmbedding(
            dense=np.eye(1, dense, dtype=np.float32)[0] if outputs.dense else None,
            sparse=nothing if outputs.sparse else None,
            colbert=np.eye(1, colbert, dtype=np.float32) if outputs.colbert else None,
        )
        return vectors_of(embedding, request, tokens if request.return_tokens else None)

    def end(self) -> bytes:
        schema = self._stream.schema_of(self._columns([Record(None, None)]))
        return b"".join([*schema, *self._stream.close()])


def _as_text(value: Any) -> str | None:
    return orjson.dumps(value).decode() if value else None


# By media type; NDJSON is the default.
WRITERS: Mapping[str, type[RecordWriter]] = {
    NDJSON: RecordWriter,
    ARROW: _ArrowWriter,
    MSGPACK: _MsgpackWriter,
    SAFETENSORS: _SafetensorsWriter,
}
# Renderers by media type; JSON, the default, has its own.
BINARY: Mapping[str, Callable[[EmbeddingAnswer], Iterator[Chunk]]] = {
    ARROW: arrow.render,
    MSGPACK: binary.render_msgpack,
    SAFETENSORS: binary.render_safetensors,
}


def media_type_of(request: Request, answered: tuple[str, ...] = (JSON, *BINARY)) -> str:
    """The media type among `answered` that the request prefers; by default the first one."""
    return preferred(preference(request.headers, "accept"), answered) or answered[0]
