"""`ingest --from-collection`: embed the texts of a collection into another one.

Texts and metadata are read from the payloads, page by page. Points keep their ids, so that a run
can be resumed after a kill, and a later ingest of the files finds them.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

from smart_embedder_client.ingest.collection import ask_service
from smart_embedder_client.ingest.errors import IngestError
from smart_embedder_client.ingest.loading import Chunk, Loader, connect, use_threads
from smart_embedder_client.ingest.options import LoadOptions, Report
from smart_embedder_client.qdrant import open_store
from smart_embedder_client.qdrant.store import MODEL, TEXT, Point, Store, Target


async def ingest_collection(
    options: LoadOptions, source: str, target: Target, url: str, token: str | None = None
) -> Report:
    """Embed the texts of the collection `source` into `target`, of the same Qdrant.

    Raises:
        IngestError, QdrantError, SmartEmbedderError: The run stopped; the message is one sentence.
    """
    began = time.monotonic()
    if source == target.collection:
        raise IngestError(f"{source} cannot be its own source: --collection names another one")
    use_threads(options)
    old_target = replace(target, collection=source)
    async with connect(options, target, url, token, title=source, unit="chunks") as connections:
        store, progress = connections.store, connections.progress
        call = connections.patience.call
        with closing(await asyncio.to_thread(open_store, old_target)) as old:
            await call(old.resolve_alias)
            if await call(old.layout) is None:
                raise IngestError(f"there is no collection {source}")
            origin, old_origin = await call(store.origin), await call(old.origin)
            served = await ask_service(
                connections.client, connections.patience, options.kinds, origin
            )
            model = served.name
            if old_origin is not None:
                # The ids of the points were made from these names.
                served = replace(served, origin=replace(served.origin, models=old_origin.models))
            loader = await connections.prepare_loader(options, served, origin)
            progress.expect(await call(old.count, None))
            await _Copy(old, loader, model).run()
            await loader.collection.start_indexing(options)
    loader.report.seconds = time.monotonic() - began
    return loader.report


@dataclass(frozen=True, slots=True)
class _Copy:
    """Copies the points of `old` with new vectors, and `model` in their payload."""

    old: Store
    loader: Loader
    model: str

    async def run(self) -> None:
        """Store the points that the loader's collection does not have."""
        collection, report = self.loader.collection, self.loader.report
        call = collection.patience.call
        offset, is_first = None, True
        try:
            async with asyncio.TaskGroup() as loads:
                while is_first or offset is not None:
                    ids, offset = await call(self.old.page, None, offset)
                    is_first = False
                    report.documents += len(ids)
                    report.points += len(ids)
                    existing = await collection.existing(ids)
                    self.loader.progress.advance(len(existing))
                    missing = [id_ for id_ in ids if id_ not in existing]
                    points = await call(partial(self.old.read, missing, with_vectors=False))
                    await self.loader.start(self._chunks(points), loads)
        except ExceptionGroup as failures:
            # The first failure cancelled the other tasks.
            raise failures.exceptions[0] from failures

    def _chunks(self, points: Sequence[Point]) -> Iterator[Chunk]:
        for point in points:
            text = point.payload.get(TEXT)
            payload = {**point.payload, MODEL: self.model}
            chunk = Chunk(point.id, str(text), payload, lambda _: self.loader.progress.advance(1))
            if isinstance(text, str):
                yield chunk
            else:
                self.loader.refuse(chunk, "it has no text that could be embedded")
