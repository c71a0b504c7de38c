"""Streams of any number of texts, sent as pages: requests of about two seconds each.

A few pages are with the service at a time, so that its device never waits for the client. A page
that is refused because of a text is tried again in halves, until the text is alone. Only the texts
and the vectors of these pages are in memory.
"""

import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from smart_embedder_client.answers import Embeddings, SparseVector, TokenStrings
from smart_embedder_client.errors import INVALID_INPUT, SmartEmbedderError
from smart_embedder_client.options import OnError
from smart_embedder_client.safetensors import Array
from smart_embedder_client.sending import OPEN_PAGES, Sender

BULK_PRIORITY = 7
_PAGE_SECONDS = 2.0
_LEAST_BYTES, _FIRST_BYTES, _MOST_BYTES = 4096, 16_384, 524_288
# As many as one request may have.
_MOST_TEXTS = 1024
_INVALID_REQUEST = "invalid_request"
# The errors that one text of a page can cause for all of them.
_OF_A_TEXT = {
    INVALID_INPUT,
    _INVALID_REQUEST,
    "text_too_long",
    "empty_input",
    "body_too_large",
    "out_of_memory",
    "inference_failed",
    "timeout",
}

Id = int | str
TextOrPair = str | tuple[Id, str]


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
    """How much is done at a time, so that it takes about two seconds.

    `size` is at most doubled or halved at once.
    """

    size: int
    least: int
    most: int

    def record(self, size: int, seconds: float) -> None:
        """Adapt to how long so much has taken; little of it tells nothing."""
        if 2 * size >= self.size:
            factor = min(max(_PAGE_SECONDS / max(seconds, 0.001), 0.5), 2.0)
            self.size = min(max(int(self.size * factor), self.least), self.most)


class PageMaker:
    """Collects texts for the next page, whose bytes `pace` decides.

    A page is also `full` after a second, so that a slow source does not hold back texts.
    """

    def __init__(self) -> None:
        self.pace = Pace(_FIRST_BYTES, _LEAST_BYTES, _MOST_BYTES)
        self._last_end: float | None = None
        self._page: list[tuple[Id, str]] = []
        self._bytes = 0
        self._count = 0
        self._began = 0.0

    def record_end(self) -> None:
        """Adapt the size when a page is answered."""
        now = time.monotonic()
        if self._last_end is not None:
            self.pace.record(self.pace.size, now - self._last_end)
        self._last_end = now

    def add(self, given: TextOrPair) -> None:
        """Add a text, or an id and a text; raises `SmartEmbedderError` for anything else."""
        match given:
            case str():
                id_, text = self._count, given
            case [id_, str(text)]:
                pass
            case _:
                raise SmartEmbedderError(
                    f"item {self._count} of the stream is {type(given).__name__}, and a stream is "
                    "made of texts, or of pairs of an id and a text",
                    INVALID_INPUT,
                )
        if not self._page:
            self._began = time.monotonic()
        self._count += 1
        self._page.append((id_, text))
        self._bytes += len(text)

    @property
    def full(self) -> bool:
        """Whether the page is to be sent."""
        return bool(self._page) and (
            self._bytes >= self.pace.size
            or len(self._page) >= _MOST_TEXTS
            or time.monotonic() - self._began > _PAGE_SECONDS / 2
        )

    def take(self) -> list[tuple[Id, str]]:
        """The ids and texts of the page, which may be empty."""
        page, self._page, self._bytes = self._page, [], 0
        return page


@dataclass(slots=True)
class Stream:
    """Sends texts in pages and yields their records, in order.

    The first page is alone with the service: its vector space is required of all others. With
    `on_error` "raise" a text that cannot be embedded ends the stream.
    """

    sender: Sender
    options: dict[str, Any]
    priority: int | None
    on_error: OnError
    _has_answer: bool = field(default=False, init=False)

    async def run(
        self, texts: Iterable[TextOrPair] | AsyncIterable[TextOrPair]
    ) -> AsyncGenerator[StreamedText]:
        """The records; a few pages are with the service at a time."""
        maker, source, http = PageMaker(), _iterate(texts), self.sender.http
        pages: deque[Any] = deque()
        try:
            while True:
                most = OPEN_PAGES if self._has_answer else 1
                while len(pages) < most and (page := await _next(maker, source)):
                    pages.append(http.start(partial(self._embed, page)))
                if not pages:
                    return
                for record in await http.result(pages.popleft()):
                    if record.error is not None and self.on_error == "raise":
                        raise record.error
                    yield record
                maker.record_end()
        finally:
            await http.cancel(pages)

    async def _embed(self, page: Sequence[tuple[Id, str]]) -> list[StreamedText]:
        """The records of a page, in halves where a text of it may be the reason of an error."""
        try:
            found = await self.sender.embed(
                [text for _, text in page],
                self.options,
                BULK_PRIORITY if self.priority is None else self.priority,
                resumes=True,
            )
        except SmartEmbedderError as error:
            if error.code not in _OF_A_TEXT:
                raise
            if len(page) > 1:
                middle = len(page) // 2
                return await self._embed(page[:middle]) + await self._embed(page[middle:])
            if error.code == _INVALID_REQUEST and not self._has_answer:
                raise  # Not the text is invalid, but the options of the stream.
            ((id_, text),) = page
            return [StreamedText(id=id_, text=text, error=error)]
        if not self._has_answer:
            self.options.setdefault("if_vector_space", list(found.vector_space.values()))
            self._has_answer = True
        return [
            StreamedText(id=id_, text=text, **_vectors_of(found, place))
            for place, (id_, text) in enumerate(page)
        ]


def _vectors_of(found: Embeddings, place: int) -> dict[str, Any]:
    """The vectors of the text in this place, copied: a view would keep those of the whole page."""
    kinds = ("dense", "dense_scale", "sparse", "colbert", "colbert_scale", "muvera", "tokens")
    fields: dict[str, Any] = {
        kind: vectors[place] for kind in kinds if (vectors := getattr(found, kind)) is not None
    }
    for kind, vectors in fields.items():
        if isinstance(vectors, SparseVector):
            fields[kind] = SparseVector(vectors.indices.copy(), vectors.values.copy())
        elif kind == "dense_scale":
            fields[kind] = float(vectors)
        elif kind != "tokens":
            fields[kind] = vectors.copy()
    warnings = [warning for warning in found.warnings if warning["target"]["index"] == place]
    return fields | {"vector_space": found.vector_space, "warnings": warnings}


async def _iterate(
    texts: Iterable[TextOrPair] | AsyncIterable[TextOrPair],
) -> AsyncIterator[TextOrPair]:
    if isinstance(texts, AsyncIterable):
        async for given in texts:
            yield given
    else:
        for given in texts:
            yield given


async def _next(maker: PageMaker, source: AsyncIterator[TextOrPair]) -> list[tuple[Id, str]]:
    async for given in source:
        maker.add(given)
        if maker.full:
            break
    return maker.take()
