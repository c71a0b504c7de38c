"""`ingest --migrate`: a new collection beside an old one, with the service's vectors of its texts.

The texts are those that the old collection has stored, so that nothing of it is missing, whatever
its sources were. Points keep their ids, so that a run that was killed goes on where it was, and a
later ingest finds them.
"""

import asyncio
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

from smart_embedder_client.async_client import AsyncClient
from smart_embedder_client.ingest.collection import Collection, Served, ask_service
from smart_embedder_client.ingest.embedding import Embedder, VectorOptions
from smart_embedder_client.ingest.loading import Chunk, Loader, use_threads
from smart_embedder_client.ingest.options import IngestError, MigrateOptions, Migration
from smart_embedder_client.ingest.pace import Patience, Progress
from smart_embedder_client.qdrant.store import (
    DENSE,
    KINDS,
    MODEL,
    TEXT,
    Origin,
    Point,
    Store,
    Target,
    open_store,
    pages,
    same_space,
)

_DIGITS = 8
_AGAIN = "the service has changed during the run: run the same command again"


async def migrate(
    options: MigrateOptions, target: Target, url: str, token: str | None = None
) -> Migration:
    """Embed the texts of a collection anew; the same call goes on after an interruption.

    When the new collection is complete, `target.collection` becomes an alias of it, if it was an
    alias before; if it is the old collection itself, only with `drop_old`, because a collection
    keeps its name as long as it exists.

    Raises:
        IngestError, QdrantError, SmartEmbedderError: Why the run stopped, in one sentence.
    """
    began = time.monotonic()
    use_threads(options)
    name = target.collection
    opened = await asyncio.to_thread(open_store, target)
    async with AsyncClient(url, token=token, max_retries=0) as client:
        with closing(opened) as old, Progress(name, "chunks") as progress:
            patience = Patience(options.patience, progress.note)
            is_alias = await patience.ask(old.resolve)
            steps = _Steps(options, name, is_alias, old, client, patience, progress)
            done = await steps.run()
    done.seconds = time.monotonic() - began
    return done


@dataclass(frozen=True, slots=True)
class _Steps:
    """From the old collection, which `name` means, to the new one."""

    options: MigrateOptions
    name: str
    is_alias: bool
    old: Store
    client: AsyncClient
    patience: Patience
    progress: Progress

    async def run(self) -> Migration:
        layout = await self.patience.ask(self.old.layout)
        if layout is None:
            return await self._name_what_replaced_it()
        if foreign := layout.kinds - set(KINDS):
            raise IngestError(
                f"the collection {self.old.collection} has vectors that the service does not make "
                f"of its texts: {', '.join(sorted(foreign))}"
            )
        stored = replace(
            self.options,
            kinds=layout.kinds,
            datatype=layout.datatype or "float32",
            colbert_pool_factor=None,
        )
        kinds, datatype = self.options.kinds or stored.kinds, self.options.datatype
        options = replace(self.options, kinds=kinds, datatype=datatype or stored.datatype)
        noted = await self.patience.ask(self.old.origin)
        served = await ask_service(self.client, self.patience, kinds)
        if served.origin is None:
            raise IngestError(
                "the service does not say in which space its vectors are, as it is older, so there "
                "is nothing to migrate to"
            )
        ids = served.origin.ids_of(kinds)
        made = json.dumps([ids, sorted(kinds), options.datatype, options.colbert_pool_factor])
        new_name = f"{self.name}-{hashlib.sha256(made.encode()).hexdigest()[:_DIGITS]}"
        has_all = options == stored or new_name == self.old.collection
        if has_all and noted is not None and ids == noted.ids_of(kinds):
            return await self._drop_what_it_replaced(noted)
        new = self.old.beside(new_name)
        with closing(new), same_space(new.collection, _AGAIN):
            origin = await self._first_origin(noted, served.origin)
            collection = await self._prepare(new, options, replace(served, origin=origin))
            return await self._fill(collection, options, served.name, origin)

    async def _first_origin(self, noted: Origin | None, served: Origin) -> Origin:
        """That of the new collection, until it is complete."""
        models = noted.models if noted is not None else ()
        if not models:
            models = [
                str(each.payload[MODEL])
                for each in await self.patience.ask(self.old.sample, 1)
                if MODEL in each.payload
            ] * len(served.models)
        return replace(served, models=models, migrated_from=self.old.collection, is_complete=False)

    async def _prepare(self, new: Store, options: MigrateOptions, served: Served) -> Collection:
        """The new collection, or what an interrupted run has made of it."""
        collection = await Collection.prepare(new, self.patience, options, served)
        origin = await self.patience.ask(new.origin)
        if origin is None and collection.is_new:
            await self.patience.ask(new.drop)
            raise IngestError(
                "this Qdrant is older than 1.16 and keeps no metadata of a collection, by which a "
                "run that was interrupted would be found: ingest the sources into a new collection"
            )
        if origin is None or origin.migrated_from != self.old.collection:
            raise IngestError(
                f"the collection {new.collection} exists, and is not one of {self.old.collection} "
                "with other vectors: remove it"
            )
        return collection

    async def _fill(
        self, collection: Collection, options: MigrateOptions, model: str, origin: Origin
    ) -> Migration:
        new, ask = collection.store, self.patience.ask
        self.progress.expect(await ask(self.old.count, None))
        self.progress.tell(f"{self.old.collection} goes into {new.collection} by {new.transport}")
        vectors = VectorOptions(
            options.kinds,
            collection.datatype,
            options.colbert_pool_factor,
            origin.ids_of(options.kinds),
        )
        most = collection.layout.most_colbert_vectors
        embedder = Embedder(self.client, vectors, self.patience, most)
        done = Migration(name=self.name, old=self.old.collection, new=new.collection)
        loader = Loader(options, collection, embedder, self.patience, self.progress, done)
        # What is stored while a pass is under way is found by the next one.
        is_changed = True
        while is_changed and not done.refused:
            before = done.uploaded
            await self._pass(loader, model)
            is_changed = done.uploaded > before
        await ask(self._remove_what_is_gone, new)
        if options.index and DENSE in collection.layout.vectors:
            await ask(new.start_indexing)
        done.points = await ask(new.count, None)
        done.pooled, done.truncated = embedder.pooled, embedder.truncated
        if not done.refused:
            await self._finish(new, replace(origin, is_complete=True), done)
        return done

    async def _pass(self, loader: Loader, model: str) -> None:
        """Store the points of the old collection that the new one does not have."""
        new, ask = loader.collection.store, self.patience.ask
        offset, is_first = None, True
        try:
            async with asyncio.TaskGroup() as loads:
                while is_first or offset is not None:
                    ids, offset = await ask(self.old.page, None, offset)
                    is_first = False
                    existing = await ask(new.existing, ids)
                    self.progress.skip(len(existing))
                    missing = [each for each in ids if each not in existing]
                    points = await ask(partial(self.old.read, missing, with_vectors=False))
                    await loader.start(self._chunks(points, model, loader), loads)
        except ExceptionGroup as failures:
            # The first one stopped the others.
            raise failures.exceptions[0] from failures

    def _chunks(self, points: Sequence[Point], model: str, loader: Loader) -> Iterator[Chunk]:
        for point in points:
            text = point.payload.get(TEXT)
            payload = {**point.payload, MODEL: model}
            chunk = Chunk(point.id, str(text), payload, lambda _: self.progress.read(1))
            if isinstance(text, str):
                yield chunk
            else:
                loader.refuse(chunk, "it has no text that could be embedded anew")

    def _remove_what_is_gone(self, new: Store) -> None:
        """What was removed from the old collection after it had been stored in the new one."""
        if new.count(None) > self.old.count(None):
            for ids in pages(new, None):
                if gone := set(ids) - self.old.existing(ids):
                    new.delete(list(gone))

    async def _finish(self, new: Store, origin: Origin, done: Migration) -> None:
        """Let `name` mean the new collection; a kill between two of the steps loses nothing."""
        ask = self.patience.ask
        await ask(new.note_origin, origin)
        if not self.is_alias and not self.options.drop_old:
            return
        # A collection has to make room for an alias of its name, and an alias can be moved before.
        if not self.is_alias:
            await ask(self.old.drop)
        await ask(new.move_alias, self.name)
        if self.is_alias and self.options.drop_old:
            await ask(self.old.drop)
        done.is_moved, done.is_dropped = True, self.options.drop_old

    async def _name_what_replaced_it(self) -> Migration:
        """Go on after a kill when the old collection was gone, and the new one had no alias yet."""
        await self.patience.ask(self.old.drop)  # A half of it may be left.
        for name in await self.patience.ask(self.old.names):
            with closing(self.old.beside(name)) as other:
                origin = await self.patience.ask(other.origin)
                if origin and origin.is_complete and origin.migrated_from == self.name:
                    await self.patience.ask(other.move_alias, self.name)
                    points = await self.patience.ask(other.count, None)
                    done = Migration(name=self.name, old=self.name, new=name, points=points)
                    done.is_moved = done.is_dropped = True
                    return done
        raise IngestError(f"there is no collection {self.name}")

    async def _drop_what_it_replaced(self, noted: Origin) -> Migration:
        """Embed nothing; a kill, or an earlier run, may have left the old collection."""
        ask = self.patience.ask
        own, before = self.old.collection, noted.migrated_from
        points = await ask(self.old.count, None)
        done = Migration(name=self.name, old=own, new=own, points=points, is_moved=self.is_alias)
        if self.options.drop_old and self.is_alias and before not in (None, self.name):
            if before in await ask(self.old.names):
                done.old, done.is_dropped = before, True
            with closing(self.old.beside(before)) as previous:
                await ask(previous.drop)
        return done
