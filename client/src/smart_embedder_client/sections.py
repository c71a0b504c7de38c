"""Divides a stream into sections: requests of some seconds each, so that a lost one costs little.

httpx reads nothing of an answer before the whole request is sent. A stream is therefore sent as
several requests, each small enough to be sent at once. A few are with the service at a time: while
the answer to one is read, it computes the next. Only texts that are sent and not answered are kept
in memory.
"""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from smart_embedder_client import safetensors
from smart_embedder_client.bodies import check_encoding
from smart_embedder_client.errors import (
    CONNECTION_LOST,
    INVALID_INPUT,
    MALFORMED,
    SmartEmbedderError,
    unexpected_answer,
)
from smart_embedder_client.records import RecordReader, StreamedText

# While one is computed, the others wait in the service.
OPEN_SECTIONS = 3
# Seconds to wait for a connection for a further section, which can be sent later, too.
POOL_SECONDS = 1.0
_SECTION_SECONDS = 2.0
_LEAST_BYTES, _FIRST_BYTES, _MOST_BYTES = 4096, 16_384, 524_288
# As many as one request may have.
_MOST_TEXTS = 1024

Id = int | str
TextOrPair = str | tuple[Id, str]


class Section:
    """Some texts that are sent as one request, and how many of them are answered."""

    def __init__(self, texts: list[tuple[Id, str]], options: Mapping[str, Any]) -> None:
        self._texts = texts
        self._options = options
        self._answered = 0
        self._reader = RecordReader(texts, options)

    @property
    def answered(self) -> int:
        """How many texts have a record."""
        return self._answered

    @property
    def body(self) -> bytes:
        """The lines that are not answered yet."""
        left = self._texts[self._answered :]
        return b"".join(json.dumps({"text": text}).encode() + b"\n" for _, text in left)

    def begin(self, response: httpx.Response) -> None:
        """Check the beginning of an answer."""
        safetensors.check_media_type(response)
        check_encoding(response)
        self._reader = RecordReader(self._texts[self._answered :], self._options)

    def read(self, response: httpx.Response, chunk: bytes) -> Iterator[StreamedText]:
        """The records in the next part of an answer.

        Raises `SmartEmbedderError` for anything else, or if the service has ended the stream.
        """
        try:
            for record in self._reader.feed(chunk):
                self._answered += 1
                yield record
        except MALFORMED as error:
            raise unexpected_answer(response, f"the stream cannot be read: {error!r}") from error

    def end(self) -> None:
        """Raise `SmartEmbedderError` unless every text has a record."""
        if self._answered < len(self._texts):
            raise SmartEmbedderError("the answer ended before all texts had one", CONNECTION_LOST)


@dataclass(slots=True)
class SectionSize:
    """The bytes of a section, adapted so that one takes about two seconds."""

    bytes: int = _FIRST_BYTES
    _last_end: float | None = None

    def record_end(self) -> None:
        """Adapt the size when a section is answered, by a factor of two at most."""
        now = time.monotonic()
        if self._last_end is not None:
            factor = _SECTION_SECONDS / max(now - self._last_end, 0.001)
            size = int(self.bytes * min(max(factor, 0.5), 2.0))
            self.bytes = min(max(size, _LEAST_BYTES), _MOST_BYTES)
        self._last_end = now


class SectionMaker:
    """Collects texts for the next section.

    A section is also `full` after a second, so that a slow source does not hold back texts.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.size = SectionSize()
        self._options = options
        self._texts: list[tuple[Id, str]] = []
        self._bytes = 0
        self._count = 0
        self._began = 0.0

    def add(self, given: TextOrPair) -> None:
        """Add a text, or an id and a text; raises `SmartEmbedderError` for anything else."""
        match given:
            case str():
                name, text = self._count, given
            case [name, str(text)]:
                pass
            case _:
                raise SmartEmbedderError(
                    f"item {self._count} of the stream is {type(given).__name__}, and a stream is "
                    "made of texts, or of pairs of an id and a text",
                    INVALID_INPUT,
                )
        if not self._texts:
            self._began = time.monotonic()
        self._count += 1
        self._texts.append((name, text))
        self._bytes += len(text)

    @property
    def full(self) -> bool:
        """Whether the section is to be sent."""
        return bool(self._texts) and (
            self._bytes >= self.size.bytes
            or len(self._texts) >= _MOST_TEXTS
            or time.monotonic() - self._began > _SECTION_SECONDS / 2
        )

    def take(self) -> Section | None:
        """The section; None if it is empty."""
        texts, self._texts, self._bytes = self._texts, [], 0
        return Section(texts, self._options) if texts else None
