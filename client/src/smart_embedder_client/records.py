"""The records that `embed_stream` yields, read from the service's stream as it arrives."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from smart_embedder_client import safetensors
from smart_embedder_client.answers import SparseVector, TokenStrings
from smart_embedder_client.errors import SmartEmbedderError
from smart_embedder_client.options import OnError
from smart_embedder_client.safetensors import Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamedText:
    """The vectors of one text of a stream, or its error.

    A kind that was not asked for is None; with an error all kinds are. The types are those of
    `Embeddings`.

    Attributes:
        id: The text's own, or its place among the texts, from 0.
        text: As it was given.
        dense: `[width]`.
        dense_scale: For int8 and uint8.
        sparse: Lexical weights.
        colbert: `[vectors, width]`.
        colbert_scale: `[vectors]` float32, for int8 and uint8.
        muvera: `[10240]` float32.
        tokens: With `return_tokens`.
        warnings: Whether the text was cut.
        error: What is wrong with this text.
    """

    id: int | str
    text: str
    dense: Array | None = None
    dense_scale: float | None = None
    sparse: SparseVector | None = None
    colbert: Array | None = None
    colbert_scale: Array | None = None
    muvera: Array | None = None
    tokens: TokenStrings | None = None
    warnings: list[dict[str, Any]] = field(default_factory=list)
    error: SmartEmbedderError | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """One record: the facts about a text, and its arrays by the names of `StreamedText`.

    Only a record that ends its stream has no id.
    """

    facts: Mapping[str, Any]
    arrays: Mapping[str, Any]

    @property
    def error(self) -> SmartEmbedderError | None:
        """The error in it."""
        told = self.facts.get("error")
        if told is None:
            return None
        return SmartEmbedderError(
            told["detail"], told["code"], told["status"], retry_after=told.get("retry_after")
        )

    def of(self, name: int | str, text: str) -> StreamedText:
        """The record as it is yielded, with the text that it is about."""
        tokens = self.facts.get("tokens")
        return StreamedText(
            id=name,
            text=text,
            tokens=None if tokens is None else TokenStrings(**tokens),
            warnings=self.facts.get("warnings", []),
            error=self.error,
            **self.arrays,
        )


def checked(record: StreamedText, on_error: OnError) -> StreamedText:
    """The record; raises its error, if `on_error` says so."""
    if record.error is not None and on_error == "raise":
        raise record.error
    return record


class RecordReader:
    """Splits a stream of safetensors files, which arrives in chunks of any size, into records."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._size: int | None = None

    @property
    def complete(self) -> bool:
        """Whether nothing is left of a file that has begun."""
        return not self._buffer

    def feed(self, chunk: bytes) -> Iterator[Record]:
        """The records of the files that are complete now; raises as `safetensors.read` does."""
        self._buffer += chunk
        while (content := self._take()) is not None:
            yield from _records(content)

    def _take(self) -> bytes | None:
        """The next whole file."""
        if self._size is None:
            self._size = safetensors.size_of(self._buffer)
        if self._size is None or len(self._buffer) < self._size:
            return None
        content = bytes(self._buffer[: self._size])
        del self._buffer[: self._size]
        self._size = None
        return content


def _records(content: bytes) -> Iterator[Record]:
    tensors, metadata = safetensors.read(content)
    row = 0
    for facts in json.loads(metadata[safetensors.METADATA_KEY])["records"]:
        if "error" in facts:
            yield Record(facts, {})
        else:
            yield Record(facts, _arrays(tensors, row))
            row += 1


def _arrays(tensors: Mapping[str, Array], row: int) -> dict[str, Any]:
    """Copies: a view would keep the vectors of all texts of the file in memory."""
    arrays: dict[str, Any] = {
        name: tensors[name][row].copy() for name in ("dense", "muvera") if name in tensors
    }
    if "dense_scale" in tensors:
        arrays["dense_scale"] = float(tensors["dense_scale"][row])
    for name in ("colbert", "colbert_scale"):
        if name in tensors:
            arrays[name] = _part(tensors[name], tensors["colbert_offsets"], row)
    if "sparse_offsets" in tensors:
        offsets = tensors["sparse_offsets"]
        arrays["sparse"] = SparseVector(
            _part(tensors["sparse_indices"], offsets, row),
            _part(tensors["sparse_values"], offsets, row),
        )
    return arrays


def _part(joined: Array, offsets: Array, row: int) -> Array:
    return np.array(joined[offsets[row] : offsets[row + 1]])
