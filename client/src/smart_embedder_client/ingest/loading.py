"""Chunks to points: embedded and stored in batches, whatever happens to one of them."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from smart_embedder_client.ingest.collection import Collection
from smart_embedder_client.ingest.embedding import Embedder, Refusal
from smart_embedder_client.ingest.options import IngestError, LoadOptions, Report
from smart_embedder_client.ingest.pace import Patience, Progress, batches
from smart_embedder_client.qdrant.store import (
    METADATA,
    SOURCE,
    Point,
    QdrantRefusedError,
    Vectors,
)
from smart_embedder_client.streams import Pace

# About 6,000 tokens of English; several requests at a time fill the service's batches.
_LEAST_REQUEST, _REQUEST_CHARACTERS, _REQUEST_TEXTS = 1_000, 24_000, 128
_MOST_REFUSED = 100
# Of an id, and of the names in a point.
_BYTES_BESIDES = 300
_OTHER_THREADS = 4


def use_threads(options: LoadOptions) -> None:
    """Have a thread for each upload to wait in, beside those that read and split."""
    threads = ThreadPoolExecutor(options.streams + _OTHER_THREADS, "ingest")
    asyncio.get_running_loop().set_default_executor(threads)


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """One point that is not stored yet; `ended` is called with whether it is stored."""

    id: str
    text: str
    payload: Mapping[str, Any]
    ended: Callable[[bool], None]


@dataclass(slots=True, eq=False)
class Loader:
    """Embeds chunks and stores them, with some requests and some uploads at a time.

    `report` counts what is stored, and names what is refused.
    """

    options: LoadOptions
    collection: Collection
    embedder: Embedder
    patience: Patience
    progress: Progress
    report: Report
    _requests: asyncio.Semaphore = field(init=False)
    _streams: asyncio.Semaphore = field(init=False)
    _request: Pace = field(init=False)

    def __post_init__(self) -> None:
        # It begins with little, so that something is stored before a kill that comes soon.
        self._request = Pace(_LEAST_REQUEST, _LEAST_REQUEST, _REQUEST_CHARACTERS)
        self._requests = asyncio.Semaphore(self.options.requests)
        streams = min(self.options.streams, self.collection.store.streams)
        self._streams = asyncio.Semaphore(streams)

    async def start(self, chunks: Iterable[Chunk], loads: asyncio.TaskGroup) -> None:
        """Start a task for each batch of them, as soon as a request may be sent."""
        for batch in batches(
            chunks, lambda chunk: len(chunk.text), lambda: self._request.size, _REQUEST_TEXTS
        ):
            await self._requests.acquire()
            loads.create_task(self._load(batch))

    async def _load(self, chunks: list[Chunk]) -> None:
        began = time.monotonic()
        try:
            vectors = await self.embedder.embed([chunk.text for chunk in chunks])
            characters = sum(len(chunk.text) for chunk in chunks)
            self._request.record(characters, time.monotonic() - began)
            embedded = []
            for chunk, each in zip(chunks, vectors, strict=True):
                if isinstance(each, Refusal):
                    self.refuse(chunk, each.reason)
                else:
                    embedded.append((chunk, each))
            for batch in batches(
                embedded, lambda pair: self._size(*pair), lambda: self.options.batch_bytes
            ):
                async with self._streams:
                    await self._upload(batch)
        finally:
            self._requests.release()

    def _size(self, chunk: Chunk, vectors: Vectors) -> int:
        """The bytes of a point on its way, about."""
        size = vectors.numbers * self.collection.store.bytes_per_number + len(chunk.text) * 4
        return size + len(str(chunk.payload.get(METADATA, ""))) + _BYTES_BESIDES

    async def _upload(self, batch: list[tuple[Chunk, Vectors]]) -> None:
        """Store points; where Qdrant refuses one, the others."""
        points = [Point(chunk.id, vectors, chunk.payload) for chunk, vectors in batch]
        try:
            await self.patience.ask(self.collection.store.upsert, points)
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
            chunk.ended(True)

    def refuse(self, chunk: Chunk, reason: str) -> None:
        """Note why a chunk is not stored; raises `IngestError` after too many."""
        self.report.refused.append((str(chunk.payload.get(SOURCE, chunk.id)), reason))
        if len(self.report.refused) > _MOST_REFUSED:
            raise IngestError(f"more than {_MOST_REFUSED} chunks were refused: {reason}")
        chunk.ended(False)
