"""One run, from the checks at its start and the first document to the last point."""

import asyncio
import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from smart_embedder_client.async_client import AsyncClient
from smart_embedder_client.client import Client
from smart_embedder_client.ingest.chunking import (
    SPECIAL_TOKENS,
    Chunker,
    FileChunker,
    ServiceChunker,
)
from smart_embedder_client.ingest.collection import Collection, Served, ask_service
from smart_embedder_client.ingest.embedding import Embedder, VectorOptions
from smart_embedder_client.ingest.journal import Journal, Recipe, chunk_ids, document_digest
from smart_embedder_client.ingest.loading import Chunk, Loader, use_threads
from smart_embedder_client.ingest.options import IngestError, IngestOptions, Report
from smart_embedder_client.ingest.pace import Patience, Progress, batches
from smart_embedder_client.ingest.sources import (
    Document,
    Skipped,
    encodable_name,
    input_bytes,
    read_documents,
)
from smart_embedder_client.qdrant.store import (
    COLBERT,
    DATASET,
    METADATA,
    MODEL,
    SOURCE,
    TEXT,
    Target,
    open_store,
    same_space,
)
from smart_embedder_client.streams import Pace

# What is read before it is looked up and split: little memory, and few questions.
_LEAST_WINDOW, _WINDOW_CHARACTERS, _WINDOW_DOCUMENTS = 50_000, 2_000_000, 1_000
_SOURCE_PATH = "source path"


@dataclass(slots=True, eq=False)
class _Load:
    """A document on its way; `missing` of its points are not stored yet."""

    document: Document
    digest: bytes
    chunks: list[str]
    ids: list[str]
    missing: int = 0
    is_refused: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Ingest:
    """Loads one source into one collection, whose points are marked with `model`; used once."""

    options: IngestOptions
    recipe: Recipe
    model: str
    chunker: Chunker
    journal: Journal
    loader: Loader
    report: Report
    _skipped: Skipped = field(default_factory=Skipped, init=False)
    _window: Pace = field(init=False)

    def __post_init__(self) -> None:
        # It begins with little, so that something is stored before a kill that comes soon.
        self._window = Pace(_LEAST_WINDOW, _LEAST_WINDOW, _WINDOW_CHARACTERS)

    async def run(self) -> Report:
        """Store what is missing; raises what `ingest` does."""
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
        report, embedder = self.report, self.loader.embedder
        report.failed, report.unread = self._skipped.failed, dict(self._skipped.unread)
        report.removed, report.stale = await self.loader.collection.finish(
            self.journal, self.options, is_whole=report.documents > 0 and not report.failed
        )
        report.points = self.journal.seen_points
        report.pooled, report.truncated = embedder.pooled, embedder.truncated
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
            await self.loader.start(chunks, loads)

    async def _missing(self, window: Sequence[Document]) -> list[Chunk]:
        """The chunks that the collection does not have."""
        new = self._not_noted(window)
        loads = await self.loader.patience.ask(self._split, new)
        ids = [each for load in loads for each in load.ids]
        self.journal.see(ids)
        existing = await self.loader.collection.existing(ids)
        chunks = []
        for load in loads:
            missing = [
                Chunk(id_, text, self._payload(load, text, metadata), partial(self._ended, load))
                for id_, text, metadata in zip(
                    load.ids, load.chunks, load.document.metadata_of(load.chunks), strict=True
                )
                if id_ not in existing
            ]
            load.missing = len(missing)
            chunks += missing
            if not missing:
                self._note(load)
                self.loader.progress.skip(load.document.size)
        return chunks

    def _payload(self, load: _Load, text: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
        payload: dict[str, Any] = {TEXT: text, SOURCE: load.document.source}
        payload |= {DATASET: self.options.dataset, MODEL: self.model}
        return payload | ({METADATA: metadata} if metadata else {})

    def _not_noted(self, window: Sequence[Document]) -> dict[bytes, Document]:
        """The documents that neither this run has seen nor an earlier one has stored."""
        first: dict[bytes, Document] = {}
        digests = [document_digest(document, self.recipe) for document in window]
        seen_first = self.journal.see_first(digests)
        for document, digest, is_first in zip(window, digests, seen_first, strict=True):
            self.report.documents += not document.is_part
            if is_first:
                first[digest] = document
            else:
                self.report.repeated += not document.is_part
                self.loader.progress.skip(document.size)
        for digest in self.journal.stored(list(first)):
            self.loader.progress.skip(first.pop(digest).size)
        return first

    def _split(self, documents: dict[bytes, Document]) -> list[_Load]:
        self.chunker.prepare(document.text for document in documents.values())
        loads = []
        for digest, document in documents.items():
            chunks = self.chunker.split(document.text, is_markdown=document.is_markdown)
            ids = chunk_ids(document, chunks, self.recipe)
            loads.append(_Load(document, digest, chunks, ids))
        return loads

    def _ended(self, load: _Load, is_stored: bool) -> None:
        load.is_refused |= not is_stored
        load.missing -= 1
        if load.missing == 0:
            self._note(load)
            self.loader.progress.read(load.document.size)

    def _note(self, load: _Load) -> None:
        if not load.is_refused:
            self.journal.add(load.digest, load.ids)


def default_journal(target: Target, dataset: str) -> Path:
    """The file for a data set in a collection, in the user's folder for the state of programs."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    told = f"{target.address}\n{target.collection}\n{dataset}"
    name = hashlib.sha256(told.encode()).hexdigest()[:16]
    return Path(state, "smart-embedder", f"ingest-{name}.sqlite")


async def ingest(
    options: IngestOptions,
    target: Target,
    url: str,
    token: str | None = None,
    journal: Path | None = None,
) -> Report:
    """Load a source into a collection; the same call goes on after an interruption.

    Raises:
        IngestError, JournalError, QdrantError, SmartEmbedderError, SourceError: Why the run
            stopped, in one sentence.
    """
    use_threads(options)
    path = journal or default_journal(target, options.dataset)
    size = await asyncio.to_thread(input_bytes, options.source)
    # Outages are waited for by `Patience`.
    async with AsyncClient(url, token=token, max_retries=0) as client:
        with (
            same_space(target.collection),
            Client(url, token=token, max_retries=0) as token_client,
            Journal(path) as notes,
            closing(await asyncio.to_thread(open_store, target)) as store,
            Progress(options.dataset, "B") as progress,
        ):
            progress.expect(size)
            patience = Patience(options.patience, progress.note)
            await patience.ask(store.resolve)
            noted = await patience.ask(store.origin)
            served = await ask_service(client, patience, options.kinds, noted)
            _check_length(options, served)
            _check_path(notes, options)
            name = target.collection
            collection = await Collection.prepare(
                store, patience, options, served, noted=noted, note=progress.note
            )
            # The journal is trusted unless the collection has less than that says.
            if options.recheck or await patience.ask(store.count, options.dataset) < notes.points:
                notes.forget()
            progress.tell(f"{options.source} goes into {name} by {store.transport}")
            limit = _chunk_limit(options, collection, progress)
            kinds, factor = options.kinds, options.colbert_pool_factor
            vectors = VectorOptions(kinds, collection.datatype, factor, collection.ids_of(kinds))
            # Ids stay the same where the models are the same under other names.
            models = (noted and noted.models) or served.models
            made = (*models, sorted(kinds), collection.datatype, factor)
            embedder = Embedder(client, vectors, patience, collection.layout.most_colbert_vectors)
            report = Report()
            prepared = Ingest(
                options=options,
                recipe=Recipe(options.dataset, made, (limit, options.overlap)),
                model=served.name,
                chunker=_chunker(options, token_client, served, limit),
                journal=notes,
                loader=Loader(options, collection, embedder, patience, progress, report),
                report=report,
            )
            return await prepared.run()


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


def _check_path(notes: Journal, options: IngestOptions) -> None:
    """Two folders of the same name must not remove each other's points."""
    path, before = encodable_name(str(options.source.resolve())), notes.fact(_SOURCE_PATH)
    if options.sync and before not in (None, path):
        raise IngestError(
            f"the data set {options.dataset} was ingested from {before} before, so {path} may not "
            "remove its points: --dataset gives this one another name"
        )
    if before is None:
        notes.note(_SOURCE_PATH, path)


def _chunk_limit(options: IngestOptions, collection: Collection, progress: Progress) -> int:
    most = collection.layout.most_colbert_vectors
    # ColBERT has a vector for each token but the first.
    if COLBERT not in options.kinds or most is None or options.chunk_tokens <= most + 1:
        return options.chunk_tokens
    if options.split_for_colbert:
        progress.note(f"chunks have at most {most + 1} tokens, so that ColBERT fits into a point")
        return most + 1
    progress.note(f"of chunks with more than {most} ColBERT vectors, these are pooled")
    return options.chunk_tokens


def _chunker(options: IngestOptions, client: Client, served: Served, chunk_tokens: int) -> Chunker:
    if options.tokenizer is not None:
        return FileChunker(options.tokenizer, chunk_tokens, options.overlap)

    def count(texts: Sequence[str]) -> Sequence[int]:
        return client.count_tokens(texts, model=served.token_model)

    return ServiceChunker(count, chunk_tokens, options.overlap)
