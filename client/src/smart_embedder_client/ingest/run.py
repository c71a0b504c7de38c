"""One run, from the first document to the last point."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from smart_embedder_client.ingest.batches import Pace, batches
from smart_embedder_client.ingest.chunking import Chunker
from smart_embedder_client.ingest.collection import Collection
from smart_embedder_client.ingest.documents import Document
from smart_embedder_client.ingest.embedding import Embedder, Refusal
from smart_embedder_client.ingest.identity import Recipe, chunk_ids, document_digest
from smart_embedder_client.ingest.journal import Journal
from smart_embedder_client.ingest.options import IngestError, IngestOptions, Report
from smart_embedder_client.ingest.patience import Patience
from smart_embedder_client.ingest.progress import Progress
from smart_embedder_client.ingest.sources import Skipped, read_documents
from smart_embedder_client.qdrant.errors import QdrantRefusedError
from smart_embedder_client.qdrant.store import (
    DATASET,
    METADATA,
    MODEL,
    SOURCE,
    TEXT,
    Point,
    Vectors,
)

# What is read before it is looked up and split: little memory, and few questions.
_LEAST_WINDOW, _WINDOW_CHARACTERS, _WINDOW_DOCUMENTS = 50_000, 2_000_000, 1_000
# About 6,000 tokens of English; several requests at a time fill the service's batches.
_LEAST_REQUEST, _REQUEST_CHARACTERS, _REQUEST_TEXTS = 1_000, 24_000, 128
_MOST_REFUSED = 100
# Of an id, and of the names in a point.
_BYTES_BESIDES = 300


@dataclass(slots=True, eq=False)
class _Load:
    """A document on its way; `missing` of its points are not stored yet."""

    document: Document
    digest: bytes
    chunks: list[str]
    ids: list[str]
    missing: int = 0
    is_refused: bool = False


@dataclass(slots=True, eq=False)
class _Chunk:
    """One point that is not stored yet."""

    id: str
    text: str
    load: _Load


@dataclass(slots=True, eq=False)
class _Embedded:
    """The same with its vectors."""

    chunk: _Chunk
    point: Point
    size: int


@dataclass(slots=True, kw_only=True, eq=False)
class Ingest:
    """Loads one source into one collection; used once.

    Attributes:
        options: Of the run.
        recipe: What makes ids.
        model: The name that points are marked with.
        collection: Where they go.
        chunker: Splits documents.
        embedder: Embeds chunks.
        journal: What is stored already.
        patience: For a Qdrant that is away.
        progress: Is told what is done.
    """

    options: IngestOptions
    recipe: Recipe
    model: str
    collection: Collection
    chunker: Chunker
    embedder: Embedder
    journal: Journal
    patience: Patience
    progress: Progress
    _requests: asyncio.Semaphore = field(init=False)
    _streams: asyncio.Semaphore = field(init=False)
    _report: Report = field(default_factory=Report, init=False)
    _skipped: Skipped = field(default_factory=Skipped, init=False)
    # Both begin with little, so that something is stored before a kill that comes soon.
    _window: Pace = field(
        default_factory=lambda: Pace(_LEAST_WINDOW, _LEAST_WINDOW, _WINDOW_CHARACTERS), init=False
    )
    _request: Pace = field(
        default_factory=lambda: Pace(_LEAST_REQUEST, _LEAST_REQUEST, _REQUEST_CHARACTERS),
        init=False,
    )

    def __post_init__(self) -> None:
        self._requests = asyncio.Semaphore(self.options.requests)
        streams = min(self.options.streams, self.collection.store.streams)
        self._streams = asyncio.Semaphore(streams)

    async def run(self) -> Report:
        """Store what is missing.

        Raises:
            IngestError: Too much was refused.
            QdrantError, SmartEmbedderError: Qdrant or the service cannot go on.
            SourceError: There is no such source.
        """
        began = time.monotonic()
        try:
            async with asyncio.TaskGroup() as loads:
                await self._load_all(loads)
        except ExceptionGroup as failures:
            # The first one stopped the others.
            raise failures.exceptions[0] from failures
        finally:
            # A cancelled task leaves its thread, for which the end of the event loop waits.
            self.chunker.stop()
        report = self._report
        report.failed, report.unread = self._skipped.failed, dict(self._skipped.unread)
        report.removed, report.stale = await self.collection.finish(
            self.journal, self.options, is_whole=report.documents > 0 and not report.failed
        )
        report.points = self.journal.seen_points
        report.pooled, report.truncated = self.embedder.pooled, self.embedder.truncated
        report.seconds = time.monotonic() - began
        return report

    async def _load_all(self, loads: asyncio.TaskGroup) -> None:
        windows = batches(
            read_documents(self.options.source, self.options.fields, self._skipped),
            lambda document: len(document.text),
            lambda: self._window.size,
            _WINDOW_DOCUMENTS,
        )
        while window := await asyncio.to_thread(next, windows, None):
            began = time.monotonic()
            chunks = await self._missing(window)
            characters = sum(len(document.text) for document in window)
            self._window.record(characters, time.monotonic() - began)
            for batch in batches(
                chunks, lambda chunk: len(chunk.text), lambda: self._request.size, _REQUEST_TEXTS
            ):
                await self._requests.acquire()
                loads.create_task(self._load(batch))

    async def _missing(self, window: Sequence[Document]) -> list[_Chunk]:
        """The chunks that the collection does not have."""
        new = self._not_noted(window)
        loads = await self.patience.ask(self._split, new)
        ids = [each for load in loads for each in load.ids]
        self.journal.see(ids)
        existing = await self.collection.existing(ids)
        chunks = []
        for load in loads:
            missing = [
                _Chunk(id_, text, load)
                for id_, text in zip(load.ids, load.chunks, strict=True)
                if id_ not in existing
            ]
            load.missing = len(missing)
            chunks += missing
            if not missing:
                self._finish(load)
        return chunks

    def _not_noted(self, window: Sequence[Document]) -> dict[bytes, Document]:
        """The documents that neither this run has seen nor an earlier one has stored."""
        first: dict[bytes, Document] = {}
        digests = [document_digest(document, self.recipe) for document in window]
        seen_first = self.journal.see_first(digests)
        for document, digest, is_first in zip(window, digests, seen_first, strict=True):
            self._report.documents += not document.is_part
            if is_first:
                first[digest] = document
            else:
                self._report.repeated += not document.is_part
                self.progress.read(document.size)
        for digest in self.journal.stored(list(first)):
            self.progress.read(first.pop(digest).size)
        return first

    def _split(self, documents: dict[bytes, Document]) -> list[_Load]:
        self.chunker.prepare(document.text for document in documents.values())
        loads = []
        for digest, document in documents.items():
            chunks = self.chunker.split(document.text, is_markdown=document.is_markdown)
            ids = chunk_ids(document, chunks, self.recipe)
            loads.append(_Load(document, digest, chunks, ids))
        return loads

    async def _load(self, chunks: list[_Chunk]) -> None:
        began = time.monotonic()
        try:
            vectors = await self.embedder.embed([chunk.text for chunk in chunks])
            characters = sum(len(chunk.text) for chunk in chunks)
            self._request.record(characters, time.monotonic() - began)
            embedded = []
            for chunk, each in zip(chunks, vectors, strict=True):
                if isinstance(each, Refusal):
                    self._refuse(chunk, each.reason)
                else:
                    embedded.append(self._with_vectors(chunk, each))
            for batch in batches(
                embedded, lambda each: each.size, lambda: self.options.batch_bytes
            ):
                async with self._streams:
                    await self._upload(batch)
        finally:
            self._requests.release()

    def _with_vectors(self, chunk: _Chunk, vectors: Vectors) -> _Embedded:
        document = chunk.load.document
        payload = {
            TEXT: chunk.text,
            SOURCE: document.source,
            DATASET: self.options.dataset,
            MODEL: self.model,
        }
        size = vectors.numbers * self.collection.store.bytes_per_number + len(chunk.text) * 4
        with_metadata = payload | ({METADATA: document.metadata} if document.metadata else {})
        size += len(str(document.metadata)) + _BYTES_BESIDES
        return _Embedded(chunk, Point(chunk.id, vectors, with_metadata), size)

    async def _upload(self, batch: list[_Embedded]) -> None:
        """Store points; where Qdrant refuses one, the others."""
        try:
            await self.patience.ask(self.collection.store.upsert, [each.point for each in batch])
        except QdrantRefusedError as error:
            if len(batch) == 1:
                self._refuse(batch[0].chunk, str(error))
                return
            half = len(batch) // 2
            await self._upload(batch[:half])
            await self._upload(batch[half:])
            return
        self._report.uploaded += len(batch)
        self.progress.store(len(batch))
        for each in batch:
            self._done(each.chunk.load)

    def _refuse(self, chunk: _Chunk, reason: str) -> None:
        self._report.refused.append((chunk.load.document.source, reason))
        if len(self._report.refused) > _MOST_REFUSED:
            raise IngestError(f"more than {_MOST_REFUSED} chunks were refused: {reason}")
        chunk.load.is_refused = True
        self._done(chunk.load)

    def _done(self, load: _Load) -> None:
        load.missing -= 1
        if load.missing == 0:
            self._finish(load)

    def _finish(self, load: _Load) -> None:
        if not load.is_refused:
            self.journal.add(load.digest, load.ids)
        self.progress.read(load.document.size)
