"""Vectors from a cache, from another request that computes the same, or else by computation.

The cache has an entry for each kind of vectors of each text, and a request computes only those that
are missing. A text that two requests need at the same time is computed once; if one of them is
cancelled, the other still gets its result.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from operator import attrgetter

from cachetools import LRUCache

from smart_embedder.engine.model import Embedder
from smart_embedder.engine.records import AnswerMemory, EmbedRequest, Outputs, TruncationOptions
from smart_embedder.engine.requests.embedding import Forwards, Task, hold_vectors, truncations_of
from smart_embedder.engine.requests.shared_cache import (
    CachedVectors,
    SharedVectors,
    join,
    kinds_of,
    of_one_text,
    split,
)
from smart_embedder.engine.scheduling.admission import Admission
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


class VectorCache:
    """Entries by key, the least recently used dropped first; to be used in the event loop.

    The arrays of an entry are read-only, and bit for bit those that were computed.
    """

    def __init__(self, max_bytes: int, shared: SharedVectors | None, metrics: Metrics) -> None:
        self._entries: LRUCache[str, CachedVectors] = LRUCache(max_bytes, attrgetter("nbytes"))
        self._shared = shared
        metrics.embedding_cache_bytes.set_function(lambda: self._entries.currsize)
        metrics.embedding_cache_entries.set_function(lambda: len(self._entries))

    def get(self, key: str) -> CachedVectors | None:
        """The entry in memory."""
        return self._entries.get(key)

    async def fetch(
        self, models: Mapping[str, Embedder], memory: AnswerMemory
    ) -> dict[str, CachedVectors]:
        """The entries that other processes have shared; keeps them in memory, too.

        `models` maps the key of each that is wanted to the model that makes it. Raises as
        `AnswerMemory.need` where `memory` has no room for them.
        """
        if self._shared is None or not models:
            return {}
        found = await self._shared.fetch(models, memory)
        await self._keep(found)
        return found

    async def put(self, entries: Mapping[str, CachedVectors]) -> None:
        """Keep entries, as far as there is room for all of them."""
        await self._keep(entries)
        if self._shared is not None:
            self._shared.put(entries)

    async def _keep(self, entries: Mapping[str, CachedVectors]) -> None:
        room, size = self._entries.maxsize, 0
        fitting = {}
        for key, entry in entries.items():
            if size + entry.nbytes <= room:
                size += entry.nbytes
                fitting[key] = entry
        if size > _LARGE_BYTES:
            copies = await asyncio.to_thread(_copy_all, fitting)
        else:
            copies = _copy_all(fitting)
        self._entries.update(copies)

    async def close(self) -> None:
        """Close connections."""
        if self._shared is not None:
            await self._shared.close()


def _copy_all(entries: Mapping[str, CachedVectors]) -> dict[str, CachedVectors]:
    return {key: entry.copied() for key, entry in entries.items()}


def make_cache(settings: Settings, metrics: Metrics) -> VectorCache | None:
    """The cache that EMBEDDING_CACHE asks for; None where it is off."""
    if not settings.caches_embeddings:
        return None
    address = settings.shared_embedding_cache
    count = metrics.embedding_cache_store_errors.inc
    shared = None if address is None else SharedVectors(address, on_error=count)
    return VectorCache(settings.embedding_cache_bytes, shared, metrics)


def keys_of(task: Task, truncation: TruncationOptions) -> dict[str, dict[str, str]]:
    """The cache's keys of each distinct text of a task, by the kind of vectors.

    They are hashes of the text and of everything else that its vectors depend on.
    """
    how = (task.prompt, task.input_type, truncation.side, truncation.max_tokens)
    begun = hashlib.blake2b(digest_size=32, person=b"smart-embedder")
    # `repr` quotes strings, so that no two tuples have one representation.
    begun.update(repr((task.models.identity_of(task.model), *how)).encode() + b"\0")
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


@dataclass(frozen=True, slots=True)
class _Filled:
    """Entries by key, and the tasks that computed some of them."""

    entries: Mapping[str, CachedVectors]
    computed: list[Task]


class _SharedWork:
    """A computation that several requests wait for; cancelled when the last of them leaves.

    Then it is `abandoned`: it has no result. It was begun for a `request`, whose texts have so many
    `characters`.
    """

    def __init__(
        self, request: EmbedRequest, characters: int, work: "asyncio.Task[_Filled]"
    ) -> None:
        self.request, self.characters = request, characters
        self.abandoned = False
        self._work = work
        self._users = 0

    @asynccontextmanager
    async def used(self) -> AsyncIterator[None]:
        """Keep the work going within the block."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if not self._users and not self._work.done():
                self.abandoned = True
                self._work.cancel()
                await asyncio.wait({self._work})

    async def result(self) -> _Filled:
        """Its result, within `used`; raises its error."""
        return await asyncio.shield(self._work)


class CachedForwards:
    """A `VectorSource` that computes with `forwards` only what `cache` does not have.

    A text found in the cache takes no place in the queue and is not tokenised.
    """

    def __init__(
        self, forwards: Forwards, cache: VectorCache, admission: Admission, metrics: Metrics
    ) -> None:
        self._forwards = forwards
        self._cache = cache
        self._admission = admission
        self._metrics = metrics
        self._in_flight: dict[str, _SharedWork] = {}

    async def compute(self, tasks: list[Task], request: EmbedRequest) -> list[Task]:
        """Implement `VectorSource`."""
        try:
            computed = await self._find_or_compute(tasks, request)
        except InvalidRequestError:
            # The error counts only the texts that were computed; this one counts all of them.
            return await self._forwards.compute(tasks, request)
        hold_vectors(tasks, request.answer)
        if not request.truncation.truncate and truncations_of(tasks, request):
            return await self._forwards.compute(tasks, request)
        return computed

    async def _find_or_compute(self, tasks: list[Task], request: EmbedRequest) -> list[Task]:
        characters = sum(len(text) for task in tasks for text in task.texts)

        def hash_texts() -> list[_Wanted]:
            return [
                _Wanted(task, text, keys)
                for task in tasks
                for text, keys in keys_of(task, request.truncation).items()
            ]

        if characters <= _LARGE_CHARACTERS:
            wanted = hash_texts()
        else:
            texts = [text for task in tasks for text in task.texts]
            wanted = await self._admission.threads.run(hash_texts, texts, request.client)
        filled = await self._fill(request, characters, wanted)
        for task in tasks:
            keys = {each.text: each.keys for each in wanted if each.task is task}
            joined = [
                join({kind: filled.entries[key] for kind, key in keys[text].items()})
                for text in task.texts
            ]
            task.read = [read for read, _ in joined]
            task.embeddings = [embedding for _, embedding in joined]
        return filled.computed

    async def _fill(self, request: EmbedRequest, characters: int, wanted: list[_Wanted]) -> _Filled:
        """Find or compute every entry."""
        keys = [key for each in wanted for key in each.keys.values()]
        entries = {key: entry for key in keys if (entry := self._cache.get(key)) is not None}
        joined = {
            key: work
            for key in keys
            if key not in entries
            and (work := self._work_to_join(key, request, characters)) is not None
        }
        self._metrics.embedding_cache_hits.labels("memory").inc(len(entries))
        self._metrics.embedding_cache_hits.labels("in_flight").inc(len(joined))
        own = _without(wanted, entries.keys() | joined.keys())
        computed: list[Task] = []
        async with AsyncExitStack() as used:
            shared = list(dict.fromkeys(joined.values()))
            for work in shared:
                await used.enter_async_context(work.used())
            if own:
                begun = self._begin(request, characters, own)
                await used.enter_async_context(begun.used())
                filled = await begun.result()
                entries |= filled.entries
                computed += filled.computed
            for work in shared:
                # What has failed there is missing here.
                with suppress(SmartEmbedderError):
                    entries |= (await work.result()).entries
        # What failed in another request is computed once more, in this one.
        again = await self._compute(request, _without(wanted, entries.keys()))
        entries |= again.entries
        # So is a text of which two kinds are not of the same tokens: one of them came from Redis.
        doubtful = [
            each for each in wanted if not of_one_text(entries[key] for key in each.keys.values())
        ]
        anew = await self._compute_missing(request, doubtful)
        return _Filled(entries | dict(anew.entries), computed + again.computed + anew.computed)

    def _work_to_join(self, key: str, request: EmbedRequest, characters: int) -> _SharedWork | None:
        """The running computation of this entry, if it ends no later than this request's own would.

        A request that joined a bulk load's computation would wait for the bulk load's turns.
        """
        work = self._under_way(key)
        if work is None:
            return None
        client = work.request.client
        may_join = (
            work.request.urgency <= request.urgency
            and work.characters <= max(_SHORT_CHARACTERS, _MUCH_MORE * characters)
            # The device is shared between clients first: a client's only request is not held back.
            and (client == request.client or self._forwards.waiting_requests(client) <= 1)
        )
        return work if may_join else None

    def _begin(self, request: EmbedRequest, characters: int, wanted: list[_Wanted]) -> _SharedWork:
        """Start the computation of entries that others may join."""
        task = asyncio.create_task(self._compute(request, wanted), name="shared-work")
        work = _SharedWork(request, characters, task)
        keys = [key for each in wanted for key in each.keys.values() if not self._under_way(key)]
        self._in_flight |= dict.fromkeys(keys, work)

        def forget(done: "asyncio.Task[_Filled]") -> None:
            if not done.cancelled():
                done.exception()  # Marks it as retrieved: all who wait may leave as it fails.
            for key in keys:
                if self._in_flight.get(key) is work:
                    del self._in_flight[key]

        task.add_done_callback(forget)
        return work

    def _under_way(self, key: str) -> _SharedWork | None:
        """The running computation that will have this entry."""
        work = self._in_flight.get(key)
        return None if work is None or work.abandoned else work

    async def _compute(self, request: EmbedRequest, wanted: list[_Wanted]) -> _Filled:
        """Fetch entries that other processes have shared, and compute the rest."""
        models = {key: each.task.model for each in wanted for key in each.keys.values()}
        found = await self._cache.fetch(models, request.answer)
        self._metrics.embedding_cache_hits.labels("redis").inc(len(found))
        filled = await self._compute_missing(request, _without(wanted, found.keys()))
        return _Filled(found | dict(filled.entries), filled.computed)

    async def _compute_missing(self, request: EmbedRequest, missing: list[_Wanted]) -> _Filled:
        """Compute entries, and keep and share them in place of any that there were."""
        if not missing:
            return _Filled({}, [])
        self._metrics.embedding_cache_misses.inc(sum(len(each.keys) for each in missing))
        groups: dict[tuple[Task, tuple[str, ...]], list[_Wanted]] = {}
        for each in missing:
            groups.setdefault((each.task, tuple(each.keys)), []).append(each)
        tasks = [
            replace(
                task,
                outputs=Outputs(**dict.fromkeys(kinds, True)),
                texts=[each.text for each in group],
            )
            for (task, kinds), group in groups.items()
        ]
        await self._forwards.compute(tasks, request)
        entries = {
            each.keys[kind]: entry
            for group, task in zip(groups.values(), tasks, strict=True)
            for each, text, vectors in zip(group, task.read, task.embeddings, strict=True)
            for kind, entry in split(text, vectors).items()
        }
        await self._cache.put(entries)
        return _Filled(entries, tasks)


def _without(wanted: list[_Wanted], keys: AbstractSet[str]) -> list[_Wanted]:
    """The texts that need more entries than `keys`, with only the keys that are left."""
    remaining = (
        replace(each, keys={kind: key for kind, key in each.keys.items() if key not in keys})
        for each in wanted
    )
    return [each for each in remaining if each.keys]
