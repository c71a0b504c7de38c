"""The records that `embed_stream` yields, read from the service's stream as it arrives."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from smart_embedder_client import limits, safetensors
from smart_embedder_client.answers import (
    SparseVector,
    TokenStrings,
    by_text,
    check_tensors,
    read_tokens,
    read_warnings,
)
from smart_embedder_client.errors import SmartEmbedderError, error_in_record
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
        row, vectors = 0, by_text(tensors)
        for facts in records:
            if "id" not in facts:
                raise error_in_record(facts["error"])
            if type(facts["id"]) is not int or facts["id"] != self._read:
                raise ValueError(f"the record {facts['id']!r:.80} in the place of {self._read}")
            name, text = self._texts[self._read]
            if "error" in facts:
                record = StreamedText(id=name, text=text, error=error_in_record(facts["error"]))
            else:
                record = StreamedText(id=name, text=text, **self._read_text(facts, vectors, row))
                row += 1
            self._read += 1
            yield record

    def _read_text(
        self, facts: Mapping[str, Any], vectors: Mapping[str, Any], row: int
    ) -> dict[str, Any]:
        """What is said about one text, and its vectors."""
        found = {name: _copied(of[row]) for name, of in vectors.items()}
        found["vector_space"] = self._spaces
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


def _copied(vectors: Any) -> Any:
    """A copy: a view would keep the vectors of all texts of the file in memory."""
    if isinstance(vectors, SparseVector):
        return SparseVector(vectors.indices.copy(), vectors.values.copy())
    return vectors.copy() if vectors.ndim else float(vectors)
