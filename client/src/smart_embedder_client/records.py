"""The records that `embed_stream` yields, read from the service's stream as it arrives."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from smart_embedder_client import limits, safetensors
from smart_embedder_client.answers import (
    SparseVector,
    TokenStrings,
    check_tensors,
    read_tokens,
    read_warnings,
)
from smart_embedder_client.errors import SmartEmbedderError, error_in_record
from smart_embedder_client.options import OnError
from smart_embedder_client.safetensors import Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamedText:
    """The vectors of one text of a stream, or its error.

    A kind that was not asked for is None; with an error all kinds are. The types are those of
    `Embeddings`, and the shapes those of one text in it.

    Attributes:
        id: The text's own, or its place among the texts, from 0.
        text: As it was given.
        vector_space: For each kind the id of the space of its vectors, as in `Embeddings`.
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
    vector_space: Mapping[str, str] = field(default_factory=dict)
    warnings: list[dict[str, Any]] = field(default_factory=list)
    error: SmartEmbedderError | None = None


def checked(record: StreamedText, on_error: OnError) -> StreamedText:
    """The record; raises its error, if `on_error` says so."""
    if record.error is not None and on_error == "raise":
        raise record.error
    return record


class RecordReader:
    """Turns the answer to some texts of a stream into records, in chunks of any size.

    Each record is checked against the text in its place, which is given with its id. No more bytes
    are held than the vectors of these texts can have.
    """

    def __init__(
        self,
        texts: Sequence[tuple[int | str, str]],
        options: Mapping[str, Any],
        spaces: Mapping[str, str] | None = None,
    ) -> None:
        self._texts = texts
        self._spaces = spaces or {}
        self._options = options
        self._limits = limits.of_vectors([text for _, text in texts], options)
        self._buffer = bytearray()
        self._size: int | None = None
        self._read = 0

    def feed(self, chunk: bytes) -> Iterator[StreamedText]:
        """The records of the files that are complete now.

        Raises one of `MALFORMED` for anything but the next records, and the `SmartEmbedderError`
        that has ended the stream.
        """
        self._buffer += chunk
        while self._buffer:
            if self._read == len(self._texts):
                raise ValueError("more than a record for each text")
            if self._size is None:
                self._size = safetensors.size_of(self._buffer, self._limits)
            if self._size is None or len(self._buffer) < self._size:
                return
            content = bytes(self._buffer[: self._size])
            del self._buffer[: self._size]
            self._size = None
            yield from self._records(content)

    def _records(self, content: bytes) -> Iterator[StreamedText]:
        tensors, told = safetensors.read(content, self._limits)
        records = told["records"]
        if not isinstance(records, list) or not records:
            raise TypeError("a file without records")
        rows = sum("error" not in each for each in records)
        check_tensors(tensors, self._options, rows, told["output_dtype"])
        row = 0
        for facts in records:
            if "id" not in facts:
                raise error_in_record(facts["error"])
            if type(facts["id"]) is not int or facts["id"] != self._read:
                raise ValueError(f"the record {facts['id']!r:.80} in the place of {self._read}")
            name, text = self._texts[self._read]
            if "error" in facts:
                record = StreamedText(id=name, text=text, error=error_in_record(facts["error"]))
            else:
                record = StreamedText(id=name, text=text, **self._read_text(facts, tensors, row))
                row += 1
            self._read += 1
            yield record

    def _read_text(
        self, facts: Mapping[str, Any], tensors: Mapping[str, Array], row: int
    ) -> dict[str, Any]:
        """What is said about one text, and its vectors."""
        found = _arrays(tensors, row) | {"vector_space": self._spaces}
        place = range(self._read, self._read + 1)
        found["warnings"] = read_warnings(facts.get("warnings", []), place)
        if facts.get("tokens") is not None:
            sparse, colbert = found.get("sparse"), found.get("colbert")
            counts = (
                None if sparse is None else len(sparse.values),
                None if colbert is None else len(colbert),
            )
            found["tokens"] = read_tokens(facts["tokens"], counts)
        return found


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
