"""Vectors from a cache, from another request that computes the same, or else by computation.

The cache has an entry for each kind of vectors of each text, and a request computes only those that
are missing. A text that two requests need at the same time is computed once; if one of them is
cancelled, the other still gets its result.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

from cachetools import LRUCache

from smart_embedder.engine.checks import AnswerMemory
from smart_embedder.engine.model import Embedder
from smart_embedder.engine.records import Outputs, TruncationOptions
from smart_embedder.engine.requests.embedding import (
    Computed,
    EmbedRequest,
    Forwards,
    Task,
    TaskResult,
    hold_vectors,
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
from smart_embedder.engine.scheduling.job import Job
from smart_embedder.errors import InvalidRequestError, SmartEmbedderError
from smart_embedder.observability.metrics import Metrics
from smart_embedder.observability.tracing import Stage
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


class KeyMaker:
    """Makes cache keys: hashes of a text and of everything else that its vectors depend on."""

    def __init__(self, task: Task, truncation: TruncationOptions) -> None:
        how = (task.prompt, task.input_type, truncation.side, truncation.max_tokens)
        depends_on = (task.identity(), *how)
        self._begun = hashlib.blake2b(digest_size=32, person=b"smart-embedder")
        # `repr` quotes strings, so that no two tuples have one representation.
        self._begun.update(repr(depends_on).encode() + b"\0")

    def keys_of(self, text: str, kinds: Sequence[str]) -> dict[str, str]:
        """The key of each kind of vectors of a text."""
        digest = self._begun.copy()
        digest.update(text.encode("utf-8", "surrogatepass"))
        name = digest.hexdigest()
        return {kind: f"{name}:{kind}" for kind in kinds}


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The keys of one text's entries, by kind; `task` is the index of its task in the request."""

    task: int
    text: str
    keys: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Filled:
    """Entries by key, with the stages and jobs that computed them."""

    entries: Mapping[str, CachedVectors]
    tokenized: list[Stage]
    jobs: list[Job]


@dataclass(frozen=True, slots=True)
class _Lookup:
    """A request that is being served, by its tasks; `characters` is the sum over their texts."""

    tasks: list[Task]
    request: EmbedRequest
    characters: int


class _SharedWork:
    """A computation that several requests wait for; cancelled when the last of them leaves.

    Then it is `abandoned`: it has no result.
    """

    def __init__(self, lookup: _Lookup, work: "asyncio.Task[_Filled]") -> None:
        self.lookup = lookup
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

    async def compute(self, tasks: list[Task], request: EmbedRequest) -> Computed:
        """Implement `VectorSource`."""
        try:
            computed = await self._find_or_compute(tasks, request)
        except InvalidRequestError:
            # The error counts only the texts that were computed; this one counts all of them.
            return await self._forwards.compute(tasks, request)
        hold_vectors(((each.task, each.texts) for each in computed.results), request.answer)
        for result in computed.results:
            if not request.options.truncation.truncate and result.truncations(request):
                return await self._forwards.compute(tasks, request)
        return computed

    async def _find_or_compute(self, tasks: list[Task], request: EmbedRequest) -> Computed:
        characters = sum(len(text) for task in tasks for text in task.texts)
        lookup = _Lookup(tasks, request, characters)
        wanted = await self._wanted(lookup)
        filled = await self._fill(lookup, list(wanted.values()))
        results = []
        for index, task in enumerate(tasks):
            joined = [
                join({kind: filled.entries[key] for kind, key in wanted[index, text].keys.items()})
                for text in task.texts
            ]
            texts, embeddings = ([*each] for each in zip(*joined, strict=True))
            results.append(TaskResult(task, texts, embeddings))
        return Computed(results, filled.tokenized, filled.jobs)

    async def _wanted(self, lookup: _Lookup) -> dict[tuple[int, str], _Wanted]:
        """The keys of each distinct text, by the index of its task and the text."""
        call = partial(_wanted_of, lookup)
        if lookup.characters <= _LARGE_CHARACTERS:
            return call()
        texts = [text for task in lookup.tasks for text in task.texts]
        return await self._admission.threads.run(call, texts, lookup.request.client)

    async def _fill(self, lookup: _Lookup, wanted: list[_Wanted]) -> _Filled:
        """Find or compute every entry."""
        keys = [key for each in wanted for key in each.keys.values()]
        entries = {key: entry for key in keys if (entry := self._cache.get(key)) is not None}
        joined = {
            key: work
            for key in keys
            if key not in entries and (work := self._work_to_join(key, lookup)) is not None
        }
        self._metrics.embedding_cache_hits.labels("memory").inc(len(entries))
        self._metrics.embedding_cache_hits.labels("in_flight").inc(len(joined))
        own = _without(wanted, entries.keys() | joined.keys())
        shared = list(dict.fromkeys(joined.values()))
        filled = await self._compute_and_join(lookup, own, shared)
        entries |= filled.entries
        # What failed in another request is computed once more, in this one.
        again = await self._compute(lookup, _without(wanted, entries.keys()))
        entries |= again.entries
        # So is a text of which two kinds are not of the same tokens: one of them came from Redis.
        doubtful = [
            each for each in wanted if not of_one_text(entries[key] for key in each.keys.values())
        ]
        anew = await self._compute_missing(lookup, doubtful)
        entries |= anew.entries
        tokenized = filled.tokenized + again.tokenized + anew.tokenized
        return _Filled(entries, tokenized, filled.jobs + again.jobs + anew.jobs)

    async def _compute_and_join(
        self, lookup: _Lookup, own: list[_Wanted], shared: list[_SharedWork]
    ) -> _Filled:
        """Compute `own`, and take the entries of other requests' computations beside them."""
        filled = _Filled({}, [], [])
        async with AsyncExitStack() as used:
            for work in shared:
                await used.enter_async_context(work.used())
            if own:
                begun = self._begin(lookup, own)
                await used.enter_async_context(begun.used())
                filled = await begun.result()
            entries = dict(filled.entries)
            for work in shared:
                # What has failed there is missing here.
                with suppress(SmartEmbedderError):
                    entries |= (await work.result()).entries
        return replace(filled, entries=entries)

    def _work_to_join(self, key: str, lookup: _Lookup) -> _SharedWork | None:
        """The running computation of this entry, if it ends no later than this request's own would.

        A request that joined a bulk load's computation would wait for the bulk load's turns.
        """
        work = self._under_way(key)
        if work is None:
            return None
        own, other = lookup.request, work.lookup.request
        similar = max(_SHORT_CHARACTERS, _MUCH_MORE * lookup.characters)
        may_join = (
            other.urgency <= own.urgency
            and work.lookup.characters <= similar
            # The device is shared between clients first: a client's only request is not held back.
            and (other.client == own.client or self._forwards.waiting_requests(other.client) <= 1)
        )
        return work if may_join else None

    def _begin(self, lookup: _Lookup, wanted: list[_Wanted]) -> _SharedWork:
        """Start the computation of entries that others may join."""
        task = asyncio.create_task(self._compute(lookup, wanted), name="shared-work")
        work = _SharedWork(lookup, task)
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

    async def _compute(self, lookup: _Lookup, wanted: list[_Wanted]) -> _Filled:
        """Fetch entries that other processes have shared, and compute the rest."""
        models = {
            key: lookup.tasks[each.task].model for each in wanted for key in each.keys.values()
        }
        found = await self._cache.fetch(models, lookup.request.answer)
        self._metrics.embedding_cache_hits.labels("redis").inc(len(found))
        computed = await self._compute_missing(lookup, _without(wanted, found.keys()))
        return replace(computed, entries=found | dict(computed.entries))

    async def _compute_missing(self, lookup: _Lookup, missing: list[_Wanted]) -> _Filled:
        """Compute entries, and keep and share them in place of any that there were."""
        if not missing:
            return _Filled({}, [], [])
        self._metrics.embedding_cache_misses.inc(sum(len(each.keys) for each in missing))
        by_kinds: dict[tuple[int, tuple[str, ...]], list[_Wanted]] = {}
        for each in missing:
            by_kinds.setdefault((each.task, tuple(each.keys)), []).append(each)
        groups = list(by_kinds.values())
        tasks = [
            replace(
                lookup.tasks[task],
                outputs=Outputs(**dict.fromkeys(kinds, True)),
                texts=[each.text for each in group],
            )
            for (task, kinds), group in by_kinds.items()
        ]
        computed = await self._forwards.compute(tasks, lookup.request)
        entries = {
            each.keys[kind]: entry
            for group, result in zip(groups, computed.results, strict=True)
            for each, text, vectors in zip(group, result.texts, result.embeddings, strict=True)
            for kind, entry in split(text, vectors).items()
        }
        await self._cache.put(entries)
        return _Filled(entries, computed.tokenized, computed.jobs)


def _wanted_of(lookup: _Lookup) -> dict[tuple[int, str], _Wanted]:
    wanted = {}
    for index, task in enumerate(lookup.tasks):
        keys, kinds = KeyMaker(task, lookup.request.options.truncation), kinds_of(task.outputs)
        for text in dict.fromkeys(task.texts):
            wanted[index, text] = _Wanted(index, text, keys.keys_of(text, kinds))
    return wanted


def _without(wanted: list[_Wanted], keys: AbstractSet[str]) -> list[_Wanted]:
    """The texts that need more entries than `keys`, with only the keys that are left."""
    remaining = (
        replace(each, keys={kind: key for kind, key in each.keys.items() if key not in keys})
        for each in wanted
    )
    return [each for each in remaining if each.keys]
