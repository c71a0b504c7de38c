"""Embed chunks and store them as points, in batches."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from typing import Any

from smart_embedder_client.async_client import AsyncClient
from smart_embedder_client.errors import SmartEmbedderError
from smart_embedder_client.ingest.collection import Collection, Served
from smart_embedder_client.ingest.embedding import Embedder
from smart_embedder_client.ingest.errors import IngestError
from smart_embedder_client.ingest.options import LoadOptions, Report
from smart_embedder_client.ingest.pace import Patience, Progress, batches
from smart_embedder_client.qdrant import open_store
from smart_embedder_client.qdrant.store import (
    COLBERT,
    METADATA,
    SOURCE,
    Origin,
    Point,
    QdrantRefusedError,
    Store,
    Target,
    TextVectors,
    same_space,
    vector_options,
)
from smart_embedder_client.streams import Pace

# About 6,000 tokens of English; several requests at a time fill the service's batches.
_MIN_REQUEST, _REQUEST_CHARACTERS, _REQUEST_TEXTS = 1_000, 24_000, 128
_MAX_REFUSED = 100
# The id and the keys of a point in an upload.
_POINT_BYTES = 300
_OTHER_THREADS = 4


def use_threads(options: LoadOptions) -> None:
    """Give each upload a thread to wait in, beside those that read and split."""
    threads = ThreadPoolExecutor(options.streams + _OTHER_THREADS, "ingest")
    asyncio.get_running_loop().set_default_executor(threads)


@dataclass(frozen=True, slots=True)
class Connections:
    """The connections of a run to the service and to Qdrant."""

    client: AsyncClient
    store: Store
    patience: Patience
    progress: Progress

    async def prepare_loader(
        self, options: LoadOptions, served: Served, origin: Origin | None
    ) -> "Loader":
        """Create the collection, or check the existing one, whose vectors have this origin."""
        collection = await Collection.prepare(
            self.store, self.patience, options, served, origin=origin
        )
        spaces = collection.origin.ids_of(options.kinds)
        vectors = vector_options(options.kinds, collection.datatype, spaces)
        if options.colbert_pool_factor is not None and COLBERT in options.kinds:
            vectors["colbert_pool_factor"] = options.colbert_pool_factor
        report, max_vectors = Report(), collection.layout.max_colbert_vectors
        embedder = Embedder(self.client, vectors, self.patience, max_vectors, report)
        return Loader(options, collection, embedder, self.progress, report)


@asynccontextmanager
async def connect(
    options: LoadOptions, target: Target, url: str, token: str | None, *, title: str, unit: str
) -> AsyncIterator[Connections]:
    """Connect to the service and to a collection, and show a progress bar in `unit`.

    Raises `QdrantError` if the service's vectors do not fit those of the collection.
    """
    # `Patience` retries in place of the client.
    async with AsyncClient(url, token=token, max_retries=0) as client:
        with (
            same_space(target.collection),
            closing(await asyncio.to_thread(open_store, target)) as store,
            Progress(f"{title} by {store.transport}", unit) as progress,
        ):
            patience = Patience(options.patience, progress.note)
            await patience.call(store.resolve_alias)
            yield Connections(client, store, patience, progress)


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A point that is not stored yet; `on_done` is called with whether it was stored."""

    id: str
    text: str
    payload: Mapping[str, Any]
    on_done: Callable[[bool], None]


@dataclass(slots=True, eq=False)
class Loader:
    """Embeds chunks and stores them, with several requests and uploads at a time.

    `report` counts stored chunks, and lists refused ones.
    """

    options: LoadOptions
    collection: Collection
    embedder: Embedder
    progress: Progress
    report: Report
    _requests: asyncio.Semaphore = field(init=False)
    _streams: asyncio.Semaphore = field(init=False)
    _pace: Pace = field(init=False)

    def __post_init__(self) -> None:
        # The first requests are small, so that points are stored even if the run is soon killed.
        self._pace = Pace(_MIN_REQUEST, _MIN_REQUEST, _REQUEST_CHARACTERS)
        self._requests = asyncio.Semaphore(self.options.requests)
        self._streams = asyncio.Semaphore(self.options.streams)

    async def start(self, chunks: Iterable[Chunk], loads: asyncio.TaskGroup) -> None:
        """Start a task for each batch of chunks, as soon as a request may be sent."""
        for batch in batches(
            chunks, lambda chunk: len(chunk.text), lambda: self._pace.size, _REQUEST_TEXTS
        ):
            await self._requests.acquire()
            loads.create_task(self._load(batch))

    async def _load(self, chunks: list[Chunk]) -> None:
        began = time.monotonic()
        try:
            vectors = await self.embedder.embed([chunk.text for chunk in chunks])
            characters = sum(len(chunk.text) for chunk in chunks)
            self._pace.record(characters, time.monotonic() - began)
            embedded = []
            for chunk, result in zip(chunks, vectors, strict=True):
                if isinstance(result, SmartEmbedderError):
                    self.refuse(chunk, str(result))
                else:
                    embedded.append((chunk, result))
            for batch in batches(
                embedded, lambda pair: self._size(*pair), lambda: self.options.batch_bytes
            ):
                async with self._streams:
                    await self._upload(batch)
        finally:
            self._requests.release()

    def _size(self, chunk: Chunk, vectors: TextVectors) -> int:
        """Estimate the bytes of a point in an upload."""
        size = vectors.numbers * self.collection.store.bytes_per_number + len(chunk.text) * 4
        return size + len(str(chunk.payload.get(METADATA, ""))) + _POINT_BYTES

    async def _upload(self, batch: list[tuple[Chunk, TextVectors]]) -> None:
        """Store points; if Qdrant refuses them, store each half by itself."""
        points = [Point(chunk.id, vectors, chunk.payload) for chunk, vectors in batch]
        try:
            await self.collection.patience.call(self.collection.store.upsert, points)
        except QdrantRefusedError as error:
            if len(batch) == 1:
                self.refuse(batch[0][0], str(error))
                return
            half = len(batch) // 2
            await self._upload(batch[:half])
            await self._upload(batch[half:])
            return
        self.report.uploaded += len(batch)
        self.progress.store(len(batch))
        for chunk, _ in batch:
            chunk.on_done(True)

    def refuse(self, chunk: Chunk, reason: str) -> None:
        """Report a chunk that is not stored; raise `IngestError` if there are too many."""
        self.report.refused.append((str(chunk.payload.get(SOURCE, chunk.id)), reason))
        if len(self.report.refused) > _MAX_REFUSED:
            raise IngestError(f"more than {_MAX_REFUSED} chunks were refused: {reason}")
        chunk.on_done(False)
