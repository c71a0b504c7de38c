"""Streams of any number of texts.

httpx reads nothing of an answer before the whole request is sent. A stream is therefore divided
into sections: requests of some seconds each, small enough to be sent at once, of which a lost one
costs little. A few are with the service at a time: while the answer to one is read, it computes the
next. Only texts that are sent and not answered are kept in memory.
"""

import json
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

import httpx

from smart_embedder_client import safetensors
from smart_embedder_client.answers import read_spaces
from smart_embedder_client.errors import (
    CONNECTION_LOST,
    INVALID_INPUT,
    MALFORMED,
    SmartEmbedderError,
    transport_errors,
    unexpected_answer,
)
from smart_embedder_client.limits import SMALL
from smart_embedder_client.options import OnError
from smart_embedder_client.records import RecordReader, StreamedText
from smart_embedder_client.sending import Sender, chunks_of, read_body

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

    def __init__(self, texts: list[tuple[Id, str]], options: dict[str, Any]) -> None:
        self._texts = texts
        self._options = options
        self._reader = RecordReader(texts, options)
        self.answered = 0

    @property
    def body(self) -> bytes:
        """The lines that are not answered yet."""
        left = self._texts[self.answered :]
        return b"".join(json.dumps({"text": text}).encode() + b"\n" for _, text in left)

    def begin(self, response: httpx.Response) -> None:
        """Check the beginning of an answer, whose vector space holds for the whole stream."""
        safetensors.check_media_type(response)
        spaces = read_spaces(response, self._options)
        self._options.setdefault("if_vector_space", list(spaces.values()))
        self._reader = RecordReader(self._texts[self.answered :], self._options, spaces)

    def read(self, response: httpx.Response, chunk: bytes) -> Iterator[StreamedText]:
        """The records in the next part of an answer.

        Raises `SmartEmbedderError` for anything else, or if the service has ended the stream.
        """
        try:
            for record in self._reader.feed(chunk):
                self.answered += 1
                yield record
        except MALFORMED as error:
            raise unexpected_answer(response, f"the stream cannot be read: {error!r}") from error

    def end(self) -> None:
        """Raise `SmartEmbedderError` unless every text has a record."""
        if self.answered < len(self._texts):
            raise SmartEmbedderError("the answer ended before all texts had one", CONNECTION_LOST)


@dataclass(slots=True)
class Pace:
    """How much is done at a time, so that it takes about two seconds.

    `size` is at most doubled or halved at once.
    """

    size: int
    least: int
    most: int

    def record(self, size: int, seconds: float) -> None:
        """Adapt to how long so much has taken; little of it tells nothing."""
        if 2 * size >= self.size:
            factor = min(max(_SECTION_SECONDS / max(seconds, 0.001), 0.5), 2.0)
            self.size = min(max(int(self.size * factor), self.least), self.most)


class SectionMaker:
    """Collects texts for the next section, whose bytes `pace` tells.

    A section is also `full` after a second, so that a slow source does not hold back texts.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.pace = Pace(_FIRST_BYTES, _LEAST_BYTES, _MOST_BYTES)
        self._last_end: float | None = None
        self._options = options
        self._texts: list[tuple[Id, str]] = []
        self._bytes = 0
        self._count = 0
        self._began = 0.0

    def record_end(self) -> None:
        """Adapt the size when a section is answered."""
        now = time.monotonic()
        if self._last_end is not None:
            self.pace.record(self.pace.size, now - self._last_end)
        self._last_end = now

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
            self._bytes >= self.pace.size
            or len(self._texts) >= _MOST_TEXTS
            or time.monotonic() - self._began > _SECTION_SECONDS / 2
        )

    def take(self) -> Section | None:
        """The section; None if it is empty."""
        texts, self._texts, self._bytes = self._texts, [], 0
        return Section(texts, self._options) if texts else None


@dataclass(frozen=True, slots=True)
class Stream:
    """Sends texts in sections and reads their records, in order.

    With `on_error` "raise" a text that cannot be embedded ends it.
    """

    sender: Sender
    options: dict[str, Any]
    priority: int | None
    on_error: OnError

    async def run(
        self, texts: Iterable[TextOrPair] | AsyncIterable[TextOrPair]
    ) -> AsyncGenerator[StreamedText]:
        """The records; a few sections are with the service at a time."""
        maker, source = SectionMaker(self.options), _iterate(texts)
        waiting: deque[tuple[Section, httpx.Response | None]] = deque()
        try:
            while True:
                while len(waiting) < OPEN_SECTIONS and (section := await _next(maker, source)):
                    response = None
                    # What cannot be sent early is sent again when its turn comes.
                    with suppress(SmartEmbedderError):
                        response = await self._open(section, POOL_SECONDS)
                    waiting.append((section, response))
                if not waiting:
                    return
                async with aclosing(self._records(*waiting.popleft())) as records:
                    async for record in records:
                        if record.error is not None and self.on_error == "raise":
                            raise record.error
                        yield record
                maker.record_end()
        finally:
            for _, response in waiting:
                if response is not None:
                    await self.sender.http.end(response)

    async def _open(self, section: Section, pool: float | None = None) -> httpx.Response:
        http, service = self.sender.http, self.sender.service
        asked = service.stream_request(section.body, self.options, self.priority, pool)
        request = http.client.build_request(**asked)
        with transport_errors(http.client, service.url):
            response = await http.send(request)
            try:
                is_stream = response.status_code == httpx.codes.OK
                whole = response if is_stream else await read_body(http, response, SMALL)
                section.begin(whole)
            except BaseException:
                await http.end(response)
                raise
        return response

    async def _records(
        self, section: Section, response: httpx.Response | None
    ) -> AsyncGenerator[StreamedText]:
        """The records of one section, which is sent again if its answer ends too early."""
        http, service = self.sender.http, self.sender.service
        retries = service.retries(resumes=True)
        while True:
            before = section.answered
            try:
                response = response or await self._open(section)
                with transport_errors(http.client, service.url):
                    async for chunk in chunks_of(http, response):
                        for record in section.read(response, chunk):
                            yield record
                section.end()
            except SmartEmbedderError as error:
                if section.answered > before:
                    retries = service.retries(resumes=True)
                pause = retries.pause_after(error)
            else:
                return
            finally:
                if response is not None:
                    await http.end(response)
            response = None
            await http.sleep(pause)


async def _iterate(
    texts: Iterable[TextOrPair] | AsyncIterable[TextOrPair],
) -> AsyncIterator[TextOrPair]:
    if isinstance(texts, AsyncIterable):
        async for given in texts:
            yield given
    else:
        for given in texts:
            yield given


async def _next(maker: SectionMaker, source: AsyncIterator[TextOrPair]) -> Section | None:
    async for given in source:
        maker.add(given)
        if maker.full:
            break
    return maker.take()
