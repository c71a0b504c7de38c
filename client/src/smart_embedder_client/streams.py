"""Streams of any number of texts, sent as pages: requests that take about two seconds each.

A few pages are sent at a time, so that the service's device never waits for the client. Only the
texts and vectors of the open pages are in memory.
"""

import time
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Sequence,
)
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from smart_embedder_client.answers import VECTOR_FIELDS, Embeddings, SparseVector, TokenStrings
from smart_embedder_client.errors import INVALID_INPUT, SmartEmbedderError
from smart_embedder_client.options import OnError
from smart_embedder_client.safetensors import Array
from smart_embedder_client.sending import OPEN_PAGES, Sender

BULK_PRIORITY = 7
_PAGE_SECONDS = 2.0
_MIN_BYTES, _FIRST_BYTES, _MAX_BYTES = 4096, 16_384, 524_288
# The service's limit of texts in a request.
_MAX_TEXTS = 1024
_INVALID_REQUEST = "invalid_request"
# The errors that one text can cause for its whole page.
_TEXT_ERRORS = {
    INVALID_INPUT,
    _INVALID_REQUEST,
    "text_too_long",
    "empty_input",
    "body_too_large",
    "out_of_memory",
    "inference_failed",
    "internal_error",
    "timeout",
}

Id = int | str
TextOrPair = str | tuple[Id, str]
# The response that has the vectors of a text, with the text's index there; or the text's error.
Embedded = tuple[Embeddings, int] | SmartEmbedderError


def is_text_error(error: SmartEmbedderError) -> bool:
    """Whether one text of a request may have caused the error."""
    return error.code in _TEXT_ERRORS


async def embed_each(
    texts: Sequence[str], embed: Callable[[Sequence[str]], Awaitable[Embeddings]]
) -> list[Embedded]:
    """Embed texts; if one may have caused an error, its halves, until that text is alone."""
    try:
        embeddings = await embed(texts)
    except SmartEmbedderError as error:
        if not is_text_error(error):
            raise
        if len(texts) == 1:
            return [error]
        half = len(texts) // 2
        return await embed_each(texts[:half], embed) + await embed_each(texts[half:], embed)
    return [(embeddings, index) for index in range(len(texts))]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamedText:
    """The vectors of one text of a stream, or its error.

    Kinds that were not requested are None, and with an error all kinds are. Types and shapes are
    those of one text in `Embeddings`.

    Attributes:
        id: The id given with the text, or its index in the stream, from 0.
        text: The text as it was given.
        vector_space: The id of the vector space of each kind, as in `Embeddings`.
        warnings: The service's warnings, such as that the text was truncated.
        error: The reason why this text has no vectors.
    """

    id: Id
    text: str
    dense: Array | None = None
    dense_scale: float | None = None
    sparse: SparseVector | None = None
    colbert: Array | None = None
    colbert_scale: Array | None = None
    muvera: Array | None = None
    tokens: TokenStrings | None = None
    vector_space: dict[str, str] = field(default_factory=dict)
    warnings: list[dict[str, Any]] = field(default_factory=list)
    error: SmartEmbedderError | None = None


@dataclass(slots=True)
class Pace:
    """A page size that adapts so that a page takes about two seconds.

    Each step at most doubles or halves `size`.
    """

    size: int
    minimum: int
    maximum: int

    def record(self, size: int, seconds: float) -> None:
        """Adapt to the seconds of a page; a page of less than half the size tells nothing."""
        if 2 * size >= self.size:
            factor = min(max(_PAGE_SECONDS / max(seconds, 0.001), 0.5), 2.0)
            self.size = min(max(int(self.size * factor), self.minimum), self.maximum)


@dataclass(slots=True)
class Stream:
    """Sends texts in pages, and yields their records in order.

    The first page is sent alone, and all others require its vector spaces.
    """

    sender: Sender
    options: dict[str, Any]
    priority: int | None
    on_error: OnError
    _is_answered: bool = field(default=False, init=False)

    async def run(
        self, texts: Iterable[TextOrPair] | AsyncIterable[TextOrPair]
    ) -> AsyncGenerator[StreamedText]:
        """Yield the records of all texts."""
        pace = Pace(_FIRST_BYTES, _MIN_BYTES, _MAX_BYTES)
        source, http = read_pages(texts, pace), self.sender.http
        pages: deque[Any] = deque()
        last_end: float | None = None
        try:
            while True:
                max_pages = OPEN_PAGES if self._is_answered else 1
                while len(pages) < max_pages and (page := await anext(source, None)):
                    pages.append(http.start(partial(self._embed, page)))
                if not pages:
                    return
                for record in await http.wait(pages.popleft()):
                    if record.error is not None and self.on_error == "raise":
                        raise record.error
                    yield record
                now = time.monotonic()
                if last_end is not None:
                    pace.record(pace.size, now - last_end)
                last_end = now
        finally:
            await http.cancel(pages)

    async def _embed(self, page: Sequence[tuple[Id, str]]) -> list[StreamedText]:
        """Embed a page."""
        found = await embed_each([text for _, text in page], self._send)
        errors = [result for result in found if isinstance(result, SmartEmbedderError)]
        if not self._is_answered and errors[0].code == _INVALID_REQUEST:
            raise errors[0]  # The stream's options are invalid, not the texts.
        return [
            StreamedText(id=id_, text=text, error=result)
            if isinstance(result, SmartEmbedderError)
            else StreamedText(id=id_, text=text, **_copy_fields(*result))
            for (id_, text), result in zip(page, found, strict=True)
        ]

    async def _send(self, texts: Sequence[str]) -> Embeddings:
        priority = BULK_PRIORITY if self.priority is None else self.priority
        embeddings = await self.sender.embed(texts, self.options, priority, resumes=True)
        if not self._is_answered:
            self.options.setdefault("if_vector_space", list(embeddings.vector_space.values()))
            self._is_answered = True
        return embeddings


def _copy_fields(embeddings: Embeddings, index: int) -> dict[str, Any]:
    """Copy the vectors of one text: a view would keep those of the whole page in memory."""
    fields: dict[str, Any] = {
        kind: vectors[index]
        for kind in VECTOR_FIELDS
        if (vectors := getattr(embeddings, kind)) is not None
    }
    for kind, vectors in fields.items():
        if isinstance(vectors, SparseVector):
            fields[kind] = SparseVector(vectors.indices.copy(), vectors.values.copy())
        elif kind == "dense_scale":
            fields[kind] = float(vectors)
        elif kind != "tokens":
            fields[kind] = vectors.copy()
    warnings = [warning for warning in embeddings.warnings if warning["target"]["index"] == index]
    return fields | {"vector_space": embeddings.vector_space, "warnings": warnings}


async def read_pages(
    texts: Iterable[TextOrPair] | AsyncIterable[TextOrPair], pace: Pace
) -> AsyncGenerator[list[tuple[Id, str]]]:
    """Yield pages of `pace.size` bytes, with an id for each text.

    A page also ends after a second, so that a slow source does not hold texts back.
    """
    page: list[tuple[Id, str]] = []
    size, count, began = 0, 0, 0.0
    async for item in _iterate(texts):
        match item:
            case str():
                id_, text = count, item
            case [id_, str(text)]:
                pass
            case _:
                raise SmartEmbedderError(
                    f"item {count} of the stream is {type(item).__name__}, and a stream is "
                    "made of texts, or of pairs of an id and a text",
                    INVALID_INPUT,
                )
        if not page:
            size, began = 0, time.monotonic()
        page.append((id_, text))
        size, count = size + len(text), count + 1
        is_late = time.monotonic() - began > _PAGE_SECONDS / 2
        if size >= pace.size or len(page) >= _MAX_TEXTS or is_late:
            yield page
            page = []
    if page:
        yield page


async def _iterate(
    texts: Iterable[TextOrPair] | AsyncIterable[TextOrPair],
) -> AsyncIterator[TextOrPair]:
    if isinstance(texts, AsyncIterable):
        async for item in texts:
            yield item
    else:
        for item in texts:
            yield item
