"""Vectors from a cache, from another request that computes the same, or else by computation.

The cache has an entry for each kind of vectors of each text, and a request computes only those that
are missing. A text that two requests need at the same time is computed once; if one of them is
cancelled, the other still gets its result.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from collections.abc import Set as AbstractSet
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from operator import attrgetter

from cachetools import LRUCache

from smart_embedder.engine.records import EmbedRequest, Outputs, TruncationOptions
from smart_embedder.engine.requests.embedding import (
    EmbeddingPipeline,
    Task,
    hold_vectors,
    truncations_of,
)
from smart_embedder.engine.requests.shared_cache import (
    CachedVectors,
    SharedVectors,
    join,
    kinds_of,
    of_one_text,
    split,
)
from smart_embedder.engine.scheduling.admission import Admission
from smart_embedder.engine.scheduling.fairness import ConcurrencyLimit
from smart_embedder.errors import InvalidRequestError, SmartEmbedderError
from smart_embedder.observability.metrics import Metrics
from smart_embedder.settings import Settings

# To copy them takes a millisecond.
_LARGE_BYTES = 2**22
# To hash them takes a tenth of a millisecond; more are hashed off the event loop.
_LARGE_CHARACTERS = 100_000
# A request may always join work of at most so many characters, about 256 tokens; it may join more
# only up to a multiple of its own.
_SHORT_CHARACTERS = 1024
_MUCH_MORE = 4


def keys_of(task: Task, truncation: TruncationOptions) -> dict[str, dict[str, str]]:
    """The cache's keys of each distinct text of a task, by the kind of vectors.

    They are hashes of the text and of everything else that its vectors depend on.
    """
    model = task.model
    how = (task.prompt, task.input_type, truncation.side, truncation.max_tokens)
    spaces = [str(model.spaces[kind]) for kind in sorted(model.spaces)]
    begun = hashlib.blake2b(digest_size=32, person=b"smart-embedder")
    # `repr` quotes strings, so that no two tuples have one representation.
    begun.update(repr((model.name, model.precision, spaces, *how)).encode() + b"\0")
    keys = {}
    for text in dict.fromkeys(task.texts):
        digest = begun.copy()
        digest.update(text.encode("utf-8", "surrogatepass"))
        name = digest.hexdigest()
        keys[text] = {kind: f"{name}:{kind}" for kind in kinds_of(task.outputs)}
    return keys


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The keys of one text's entries, by kind."""

    task: Task
    text: str
    keys: dict[str, str]


Entries = dict[str, CachedVectors]


@dataclass(eq=False)
class _SharedWork:
    """A computation that several requests wait for; cancelled when the last of its users leaves.

    It was begun for a `request`, whose texts have so many `characters`, and makes the entries of
    these `keys`.
    """

    request: EmbedRequest
    characters: int
    keys: list[str]
    work: "asyncio.Task[Entries]"
    users: int = 0


class CachedPipeline(EmbeddingPipeline):
    """Computes only what it has no entry for.

    Entries are kept in memory by key, the least recently used dropped first, and shared by a Redis
    where EMBEDDING_CACHE names one. Their arrays are read-only, and bit for bit those that were
    computed. A text that is found takes no place in the queue and is not tokenised. To be used in
    the event loop's thread.
    """

    def __init__(
        self, admission: Admission, waiting: ConcurrencyLimit, settings: Settings, metrics: Metrics
    ) -> None:
        super().__init__(admission, waiting)
        self._metrics = metrics
        self._entries: LRUCache[str, CachedVectors] = LRUCache(
            settings.embedding_cache_bytes, attrgetter("nbytes")
        )
        self._shared: SharedVectors | None = None
        if (address := settings.shared_embedding_cache) is not None:
            self._shared = SharedVectors(address, metrics.embedding_cache_store_errors.inc)
        self._in_flight: dict[str, _SharedWork] = {}
        metrics.embedding_cache_bytes.set_function(lambda: self._entries.currsize)
        metrics.embedding_cache_entries.set_function(lambda: len(self._entries))

    async def close(self) -> None:
        """Close connections."""
        if self._shared is not None:
            await self._shared.close()

    async def compute(self, tasks: list[Task], request: EmbedRequest) -> None:
        """Find what was computed before, and compute the rest."""
        try:
            await self._find_or_compute(tasks, request)
        except InvalidRequestError:
            # The error counts only the texts that were computed; this one counts all of them.
            await super().compute(tasks, request)
            return
        hold_vectors(tasks, request.answer)
        if not request.truncation.truncate and truncations_of(tasks, request):
            await super().compute(tasks, request)

    async def _find_or_compute(self, tasks: list[Task], request: EmbedRequest) -> None:
        def hash_texts() -> list[_Wanted]:
            return [
                _Wanted(task, text, keys)
                for task in tasks
                for text, keys in keys_of(task, request.truncation).items()
            ]

        texts = [text for task in tasks for text in task.texts]
        characters = sum(map(len, texts))
        if characters <= _LARGE_CHARACTERS:
            wanted = hash_texts()
        else:
            wanted = await self._admission.threads.run(hash_texts, texts, request.client)
        entries = await self._fill(request, characters, wanted)
        joined = {
            (each.task, each.text): join({kind: entries[key] for kind, key in each.keys.items()})
            for each in wanted
        }
        for task in tasks:
            task.read = [joined[task, text][0] for text in task.texts]
            task.embeddings = [joined[task, text][1] for text in task.texts]

    async def _fill(self, request: EmbedRequest, characters: int, wanted: list[_Wanted]) -> Entries:
        """Find or compute every entry."""
        keys = [key for each in wanted for key in each.keys.values()]
        entries = {key: entry for key in keys if (entry := self._entries.get(key)) is not None}
        joined = {
            key: work
            for key in keys
            if key not in entries and (work := self._work_to_join(key, request, characters))
        }
        self._metrics.embedding_cache_hits.labels("memory").inc(len(entries))
        self._metrics.embedding_cache_hits.labels("in_flight").inc(len(joined))
        own = _without(wanted, entries.keys() | joined.keys())
        async with AsyncExitStack() as used:
            shared = list(dict.fromkeys(joined.values()))
            for work in shared:
                await used.enter_async_context(self._used(work))
            if own:
                begun = self._begin(request, characters, own)
                await used.enter_async_context(self._used(begun))
                entries |= await asyncio.shield(begun.work)
            for work in shared:
                # What has failed there is missing here.
                with suppress(SmartEmbedderError):
                    entries |= await asyncio.shield(work.work)
        # What failed in another request is computed once more, in this one.
        entries |= await self._compute(request, _without(wanted, entries.keys()))
        # So is a text of which two kinds are not of the same tokens: one of them came from Redis.
        doubtful = [
            each for each in wanted if not of_one_text(entries[key] for key in each.keys.values())
        ]
        return entries | await self._compute_missing(request, doubtful)

    def _work_to_join(self, key: str, request: EmbedRequest, characters: int) -> _SharedWork | None:
        """The running computation of this entry, if it ends no later than this request's own would.

        A request that joined a bulk load's computation would wait for the bulk load's turns.
        """
        work = self._in_flight.get(key)
        if work is None:
            return None
        client = work.request.client
        may_join = (
            work.request.urgency <= request.urgency
            and work.characters <= max(_SHORT_CHARACTERS, _MUCH_MORE * characters)
            # The device is shared between clients first: a client's only request is not held back.
            and (client == request.client or self._waiting.held_by(client) <= 1)
        )
        return work if may_join else None

    def _begin(self, request: EmbedRequest, characters: int, wanted: list[_Wanted]) -> _SharedWork:
        """Start the computation of entries that others may join."""
        task = asyncio.create_task(self._compute(request, wanted), name="shared-work")
        keys = [key for each in wanted for key in each.keys.values() if key not in self._in_flight]
        work = _SharedWork(request, characters, keys, task)
        self._in_flight |= dict.fromkeys(keys, work)

        def forget(done: "asyncio.Task[Entries]") -> None:
            if not done.cancelled():
                done.exception()  # Marks it as retrieved: all who wait may leave as it fails.
            self._forget(work)

        task.add_done_callback(forget)
        return work

    @asynccontextmanager
    async def _used(self, work: _SharedWork) -> AsyncIterator[None]:
        """Keep the work going within the block."""
        work.users += 1
        try:
            yield
        finally:
            work.users -= 1
            if not work.users and not work.work.done():
                self._forget(work)
                work.work.cancel()
                await asyncio.wait({work.work})

    def _forget(self, work: _SharedWork) -> None:
        for key in work.keys:
            if self._in_flight.get(key) is work:
                del self._in_flight[key]

    async def _compute(self, request: EmbedRequest, wanted: list[_Wanted]) -> Entries:
        """Fetch entries that other processes have shared, and compute the rest."""
        found: Entries = {}
        if self._shared is not None and wanted:
            models = {key: each.task.model for each in wanted for key in each.keys.values()}
            found = await self._shared.fetch(models, request.answer)
            await self._keep(found)
            self._metrics.embedding_cache_hits.labels("redis").inc(len(found))
        missing = _without(wanted, found.keys())
        return found | await self._compute_missing(request, missing)

    async def _compute_missing(self, request: EmbedRequest, missing: list[_Wanted]) -> Entries:
        """Compute entries, and keep and share them in place of any that there were."""
        if not missing:
            return {}
        self._metrics.embedding_cache_misses.inc(sum(len(each.keys) for each in missing))
        groups: dict[tuple[Task, tuple[str, ...]], list[_Wanted]] = {}
        for each in missing:
            groups.setdefault((each.task, tuple(each.keys)), []).append(each)
        tasks = [
            replace(task, outputs=Outputs.of(kinds), texts=[each.text for each in group])
            for (task, kinds), group in groups.items()
        ]
        await super().compute(tasks, request)
        for (whole, _), part in zip(groups, tasks, strict=True):
            whole.parts.append(part)
        entries = {
            each.keys[kind]: entry
            for group, task in zip(groups.values(), tasks, strict=True)
            for each, text, vectors in zip(group, task.read, task.embeddings, strict=True)
            for kind, entry in split(text, vectors).items()
        }
        kept = await self._keep(entries)
        if self._shared is not None:
            # Others, as views, hold the results of the whole job while they are written.
            self._shared.put(entries | kept)
        return entries

    async def _keep(self, entries: Entries) -> Entries:
        """Keep copies of entries, as far as there is room for all of them; returns the copies."""
        size, fitting = 0, Entries()
        for key, entry in entries.items():
            if size + entry.nbytes <= self._entries.maxsize:
                size += entry.nbytes
                fitting[key] = entry

        def copy() -> Entries:
            return {key: entry.copied() for key, entry in fitting.items()}

        copies = await asyncio.to_thread(copy) if size > _LARGE_BYTES else copy()
        self._entries.update(copies)
        return copies


def _without(wanted: list[_Wanted], keys: AbstractSet[str]) -> list[_Wanted]:
    """The texts that need more entries than `keys`, with only the keys that are left."""
    remaining = (
        replace(each, keys={kind: key for kind, key in each.keys.items() if key not in keys})
        for each in wanted
    )
    return [each for each in remaining if each.keys]
