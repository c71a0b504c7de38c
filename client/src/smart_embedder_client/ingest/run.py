"""Load files into a collection: from the checks at the start to the last point."""

import asyncio
import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from smart_embedder_client.client import Client
from smart_embedder_client.ingest.chunking import (
    SPECIAL_TOKENS,
    Chunker,
    FileChunker,
    ServiceChunker,
)
from smart_embedder_client.ingest.collection import Served, ask_service
from smart_embedder_client.ingest.errors import IngestError
from smart_embedder_client.ingest.journal import Journal, Recipe, chunk_ids, document_digest
from smart_embedder_client.ingest.loading import Chunk, Loader, connect, use_threads
from smart_embedder_client.ingest.options import IngestOptions, Report
from smart_embedder_client.ingest.pace import batches
from smart_embedder_client.ingest.sources import (
    Document,
    Skipped,
    encodable_name,
    input_bytes,
    read_documents,
)
from smart_embedder_client.qdrant.store import (
    DATASET,
    METADATA,
    MODEL,
    SOURCE,
    TEXT,
    Target,
)
from smart_embedder_client.streams import Pace

# Documents are read, looked up and split in windows: little memory, and few requests.
_MIN_WINDOW, _WINDOW_CHARACTERS, _WINDOW_DOCUMENTS = 50_000, 2_000_000, 1_000


@dataclass(slots=True, eq=False)
class _OpenDocument:
    """A document whose chunks are not all stored; `missing` counts those."""

    document: Document
    digest: bytes
    chunks: list[str]
    ids: list[str]
    missing: int = 0
    is_refused: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Ingest:
    """Loads one source into one collection, once; `model` is stored in the points' payload."""

    options: IngestOptions
    recipe: Recipe
    model: str
    chunker: Chunker
    journal: Journal
    loader: Loader
    _skipped: Skipped = field(default_factory=Skipped, init=False)
    _window: Pace = field(init=False)

    def __post_init__(self) -> None:
        # The first window is small, so that points are stored even if the run is soon killed.
        self._window = Pace(_MIN_WINDOW, _MIN_WINDOW, _WINDOW_CHARACTERS)

    async def run(self) -> Report:
        """Store the points that are missing; raises the errors of `ingest`."""
        began = time.monotonic()
        try:
            async with asyncio.TaskGroup() as loads:
                await self._load_all(loads)
        except ExceptionGroup as failures:
            # The first failure cancelled the other tasks.
            raise failures.exceptions[0] from failures
        finally:
            # The event loop waits for its threads: one that splits a text must stop.
            self.chunker.stop()
        report, collection = self.loader.report, self.loader.collection
        report.failed, report.unread = self._skipped.failed, dict(self._skipped.unread)
        await collection.start_indexing(self.options)
        report.removed, report.stale = await collection.sync(
            self.journal, self.options, is_complete=report.documents > 0 and not report.failed
        )
        report.points = self.journal.seen_points
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
            chunks = await self._find_missing(window)
            characters = sum(len(document.text) for document in window)
            self._window.record(characters, time.monotonic() - began)
            await self.loader.start(chunks, loads)

    async def _find_missing(self, window: Sequence[Document]) -> list[Chunk]:
        """Return the chunks that the collection does not have."""
        new = self._find_new(window)
        documents = await self.loader.collection.patience.call(self._split, new)
        ids = [id_ for opened in documents for id_ in opened.ids]
        self.journal.mark_seen(ids)
        existing = await self.loader.collection.existing(ids)
        chunks = []
        for opened in documents:
            document, on_done = opened.document, partial(self._count_done, opened)
            missing = [
                Chunk(id_, text, self._payload(document, text), on_done)
                for id_, text in zip(opened.ids, opened.chunks, strict=True)
                if id_ not in existing
            ]
            opened.missing = len(missing)
            chunks += missing
            if not missing:
                self._note_stored(opened)
                self.loader.progress.advance(document.size)
        return chunks

    def _payload(self, document: Document, text: str) -> dict[str, Any]:
        payload: dict[str, Any] = {TEXT: text, SOURCE: document.source}
        payload |= {DATASET: self.options.dataset, MODEL: self.model}
        return payload | ({METADATA: document.metadata} if document.metadata else {})

    def _find_new(self, window: Sequence[Document]) -> dict[bytes, Document]:
        """Return the documents that are new in this run and not in the journal, by digest."""
        new: dict[bytes, Document] = {}
        digests = [document_digest(document, self.recipe) for document in window]
        seen_first = self.journal.see_first(digests)
        for document, digest, is_first in zip(window, digests, seen_first, strict=True):
            self.loader.report.documents += not document.is_part
            if is_first:
                new[digest] = document
            else:
                self.loader.report.repeated += not document.is_part
                self.loader.progress.advance(document.size)
        for digest in self.journal.stored(list(new)):
            self.loader.progress.advance(new.pop(digest).size)
        return new

    def _split(self, documents: dict[bytes, Document]) -> list[_OpenDocument]:
        self.chunker.prepare(document.text for document in documents.values())
        split = []
        for digest, document in documents.items():
            chunks = self.chunker.split(document.text, is_markdown=document.is_markdown)
            ids = chunk_ids(document, chunks, self.recipe)
            split.append(_OpenDocument(document, digest, chunks, ids))
        return split

    def _count_done(self, opened: _OpenDocument, is_stored: bool) -> None:
        opened.is_refused |= not is_stored
        opened.missing -= 1
        if opened.missing == 0:
            self._note_stored(opened)
            self.loader.progress.advance(opened.document.size)

    def _note_stored(self, opened: _OpenDocument) -> None:
        if not opened.is_refused:
            self.journal.add(opened.digest, opened.ids)


def default_journal(target: Target, dataset: str) -> Path:
    """Return the journal of a data set in a collection, in the user's folder for state."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    key = f"{target.address}\n{target.collection}\n{dataset}"
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    return Path(state, "smart-embedder", f"ingest-{name}.sqlite")


async def ingest(
    options: IngestOptions,
    target: Target,
    url: str,
    token: str | None = None,
    journal: Path | None = None,
) -> Report:
    """Load a source into a collection; the same call resumes an interrupted run.

    Raises:
        IngestError, QdrantError, SmartEmbedderError: The run stopped; the message is one sentence.
    """
    use_threads(options)
    path = journal or default_journal(target, options.dataset)
    size = await asyncio.to_thread(input_bytes, options.source)
    with Client(url, token=token, max_retries=0) as token_client, Journal(path) as notes:
        async with connect(
            options, target, url, token, title=options.dataset, unit="B"
        ) as connections:
            store, progress = connections.store, connections.progress
            call = connections.patience.call
            progress.expect(size)
            origin = await call(store.origin)
            served = await ask_service(
                connections.client, connections.patience, options.kinds, origin
            )
            _check_length(options, served)
            _check_path(notes, options)
            loader = await connections.prepare_loader(options, served, origin)
            # If the collection has fewer points than the journal, that is not trusted.
            if options.recheck or await call(store.count, options.dataset) < notes.points:
                notes.forget()
            # The ids stay the same if the same models get other names.
            models = loader.collection.origin.models
            factor, datatype = options.colbert_pool_factor, loader.collection.datatype
            vectors = (*models, sorted(options.kinds), datatype, factor)
            run = Ingest(
                options=options,
                recipe=Recipe(options.dataset, vectors, (options.chunk_tokens, options.overlap)),
                model=served.name,
                chunker=_make_chunker(options, token_client, served),
                journal=notes,
                loader=loader,
            )
            return await run.run()


def _check_length(options: IngestOptions, served: Served) -> None:
    if options.chunk_tokens > served.max_tokens:
        raise IngestError(
            f"chunks of {options.chunk_tokens} tokens are longer than the {served.max_tokens} that "
            "the service reads of a text"
        )
    if not options.overlap < options.chunk_tokens - SPECIAL_TOKENS:
        raise IngestError(
            f"an overlap of {options.overlap} tokens needs chunks of more than "
            f"{options.overlap + SPECIAL_TOKENS}"
        )


def _check_path(journal: Journal, options: IngestOptions) -> None:
    """Raise `IngestError` if another folder of the same name could lose its points."""
    path = encodable_name(str(options.source.resolve()))
    first = journal.first_source(path)
    if options.sync and first != path:
        raise IngestError(
            f"the data set {options.dataset} was ingested from {first} before, so {path} may not "
            "remove its points: --dataset gives this one another name"
        )


def _make_chunker(options: IngestOptions, client: Client, served: Served) -> Chunker:
    if options.tokenizer is not None:
        return FileChunker(options.tokenizer, options.chunk_tokens, options.overlap)

    def count(texts: Sequence[str]) -> Sequence[int]:
        return client.count_tokens(texts, model=served.token_model)

    return ServiceChunker(count, options.chunk_tokens, options.overlap)
