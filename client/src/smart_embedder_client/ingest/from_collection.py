"""`ingest --from-collection`: the texts of a collection, embedded into another one.

Texts and metadata are read from the payloads, page by page. Points keep their ids, so that a run
that was killed goes on where it was, and a later ingest of the files finds them.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

from smart_embedder_client.async_client import AsyncClient
from smart_embedder_client.ingest.collection import Collection, ask_service
from smart_embedder_client.ingest.embedding import Embedder, VectorOptions
from smart_embedder_client.ingest.loading import Chunk, Loader, use_threads
from smart_embedder_client.ingest.options import IngestError, LoadOptions, Report
from smart_embedder_client.ingest.pace import Patience, Progress
from smart_embedder_client.qdrant.store import (
    DENSE,
    MODEL,
    TEXT,
    Point,
    Store,
    Target,
    open_store,
    same_space,
)


async def ingest_collection(
    options: LoadOptions, source: str, target: Target, url: str, token: str | None = None
) -> Report:
    """Embed the texts of the collection `source` into `target`, of the same Qdrant.

    Raises:
        IngestError, QdrantError, SmartEmbedderError: Why the run stopped, in one sentence.
    """
    began = time.monotonic()
    if source == target.collection:
        raise IngestError(f"{source} cannot be its own source: --collection names another one")
    use_threads(options)
    # Outages are waited for by `Patience`.
    async with AsyncClient(url, token=token, max_retries=0) as client:
        with (
            same_space(target.collection),
            closing(await asyncio.to_thread(open_store, target)) as store,
            closing(await asyncio.to_thread(store.beside, source)) as old,
            Progress(source, "chunks") as progress,
        ):
            patience = Patience(options.patience, progress.note)
            for each in (old, store):
                await patience.ask(each.resolve)
            if await patience.ask(old.layout) is None:
                raise IngestError(f"there is no collection {source}")
            noted, before = await patience.ask(store.origin), await patience.ask(old.origin)
            served = await ask_service(client, patience, options.kinds, noted)
            if served.origin is not None and before is not None:
                # The ids of the points follow from these names.
                served = replace(served, origin=replace(served.origin, models=before.models))
            collection = await Collection.prepare(
                store, patience, options, served, noted=noted, note=progress.note
            )
            progress.expect(await patience.ask(old.count, None))
            progress.tell(f"{old.collection} goes into {store.collection} by {store.transport}")
            vectors = VectorOptions(
                options.kinds,
                collection.datatype,
                options.colbert_pool_factor,
                collection.ids_of(options.kinds),
            )
            most = collection.layout.most_colbert_vectors
            embedder, report = Embedder(client, vectors, patience, most), Report()
            loader = Loader(options, collection, embedder, patience, progress, report)
            await _Copy(old, loader, served.name).run()
            if options.index and DENSE in collection.layout.vectors:
                await patience.ask(store.start_indexing)
    report.pooled, report.truncated = embedder.pooled, embedder.truncated
    report.seconds = time.monotonic() - began
    return report


@dataclass(frozen=True, slots=True)
class _Copy:
    """The points of `old`, on their way into the loader's collection, marked with `model`."""

    old: Store
    loader: Loader
    model: str

    async def run(self) -> None:
        """Store the points that the loader's collection does not have."""
        collection, ask, report = (
            self.loader.collection,
            self.loader.patience.ask,
            self.loader.report,
        )
        offset, is_first = None, True
        try:
            async with asyncio.TaskGroup() as loads:
                while is_first or offset is not None:
                    ids, offset = await ask(self.old.page, None, offset)
                    is_first = False
                    report.documents += len(ids)
                    report.points += len(ids)
                    existing = await collection.existing(ids)
                    self.loader.progress.skip(len(existing))
                    missing = [id_ for id_ in ids if id_ not in existing]
                    points = await ask(partial(self.old.read, missing, with_vectors=False))
                    await self.loader.start(self._chunks(points), loads)
        except ExceptionGroup as failures:
            # The first one stopped the others.
            raise failures.exceptions[0] from failures

    def _chunks(self, points: Sequence[Point]) -> Iterator[Chunk]:
        for point in points:
            text = point.payload.get(TEXT)
            payload = {**point.payload, MODEL: self.model}
            chunk = Chunk(point.id, str(text), payload, lambda _: self.loader.progress.read(1))
            if isinstance(text, str):
                yield chunk
            else:
                self.loader.refuse(chunk, "it has no text that could be embedded")
