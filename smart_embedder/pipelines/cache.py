"""A cache of vectors in memory: a text that comes again is not computed again.

An entry holds the tokens and the vectors of one text, under a hash of the text and of everything
else that they depend on. A request takes the entries that have every kind it asks for, computes its
other texts, and adds their vectors to the cache. When the entries exceed their bytes, the least
recently used are dropped.
"""

import asyncio
import hashlib
from dataclasses import dataclass, replace
from operator import attrgetter

from cachetools import LRUCache

from smart_embedder.errors import InvalidRequestError
from smart_embedder.metrics import EngineMetrics
from smart_embedder.pipelines.embedding import (
    EmbeddingPipeline,
    ModelWork,
    hold_vectors,
    truncations_of,
)
from smart_embedder.pipelines.validation import check_truncations
from smart_embedder.requests import EmbedRequest, Outputs, TruncationOptions
from smart_embedder.results import TextEmbedding, in_own_memory
from smart_embedder.scheduling.admission import Admission, ConcurrencyLimit
from smart_embedder.tokens import TokenizedText
from smart_embedder.vector_space import VECTORS

# To copy them takes a millisecond; more are copied off the event loop.
_LARGE_BYTES = 2**22
# To hash them takes a tenth of a millisecond; more are hashed off the event loop.
_LARGE_CHARACTERS = 100_000
# Python's objects around the arrays of an entry, and its place in the cache.
_OVERHEAD_BYTES = 1200


@dataclass(frozen=True, slots=True)
class Entry:
    """The tokens and the vectors of one text."""

    read: TokenizedText
    vectors: TextEmbedding

    @property
    def nbytes(self) -> int:
        """The bytes of memory that it takes."""
        return self.vectors.nbytes + self.read.ids.nbytes + _OVERHEAD_BYTES

    def only(self, outputs: Outputs) -> "Entry | None":
        """The entry with these kinds of vectors alone; None if it lacks one of them."""
        kinds = {kind: getattr(self.vectors, kind) for kind in VECTORS if getattr(outputs, kind)}
        if any(vectors is None for vectors in kinds.values()):
            return None
        return Entry(self.read, TextEmbedding(**kinds))

    def with_kinds_of(self, older: "Entry") -> "Entry":
        """The entry with the kinds of vectors that only the older one has."""
        kinds = {}
        for kind in VECTORS:
            vectors = getattr(self.vectors, kind)
            kinds[kind] = getattr(older.vectors, kind) if vectors is None else vectors
        return Entry(self.read, TextEmbedding(**kinds))

    def copied(self) -> "Entry":
        """A read-only copy: the arrays may be views of the results of a whole batch."""
        ids = self.read.ids.copy()
        (vectors,) = in_own_memory([self.vectors])
        for array in (ids, *vectors.arrays):
            if array is not None:
                array.flags.writeable = False
        return Entry(replace(self.read, ids=ids), vectors)


@dataclass(frozen=True, slots=True)
class _Lookup:
    """The entries that were found for the texts of a task, and a task for the missing ones.

    `keys` are those of each distinct text.
    """

    task: ModelWork
    keys: dict[str, bytes]
    found: dict[str, Entry]
    missing: ModelWork


class CachedPipeline(EmbeddingPipeline):
    """Computes only the texts that it has no entry for; used in the event loop's thread.

    Vectors from an entry are bit for bit those that were computed. A text that is found takes no
    place in the queue and is not tokenised.
    """

    def __init__(
        self,
        admission: Admission,
        waiting: ConcurrencyLimit,
        max_bytes: int,
        metrics: EngineMetrics,
    ) -> None:
        super().__init__(admission, waiting)
        self._metrics = metrics
        self._entries: LRUCache[bytes, Entry] = LRUCache(max_bytes, attrgetter("nbytes"))

    @property
    def nbytes(self) -> int:
        """The memory that the entries take."""
        return int(self._entries.currsize)

    @property
    def count(self) -> int:
        """The number of entries, one for each text and model."""
        return len(self._entries)

    async def compute(self, tasks: list[ModelWork], request: EmbedRequest) -> None:
        """Find the texts that were computed before, and compute the rest."""
        keys = await self._hash_texts(tasks, request)
        lookups = [self._look_up(*pair) for pair in zip(tasks, keys, strict=True)]
        missing = [lookup.missing for lookup in lookups if lookup.missing.texts]
        self._metrics.cached(
            hits=sum(len(lookup.found) for lookup in lookups),
            misses=sum(len(task.texts) for task in missing),
        )
        if missing:
            try:
                await super().compute(missing, request)
            except InvalidRequestError:
                # That error counts only the missing texts; this one counts all of them.
                await super().compute(tasks, request)
                return
        for lookup in lookups:
            await self._complete(lookup)
        if not request.truncation.truncate:
            check_truncations(truncations_of(tasks, request), request.truncation)
        hold_vectors(tasks, request.answer)

    async def _hash_texts(
        self, tasks: list[ModelWork], request: EmbedRequest
    ) -> list[dict[str, bytes]]:
        def hash_texts() -> list[dict[str, bytes]]:
            return [keys_of(task, request.truncation) for task in tasks]

        texts = [text for task in tasks for text in task.texts]
        if sum(map(len, texts)) <= _LARGE_CHARACTERS:
            return hash_texts()
        return await self._admission.threads.run(hash_texts, texts, request.client)

    def _look_up(self, task: ModelWork, keys: dict[str, bytes]) -> _Lookup:
        """Find the entries that have all kinds of vectors that the task makes."""
        found = {}
        for text, key in keys.items():
            kept = self._entries.get(key)
            if kept is not None and (entry := kept.only(task.outputs)) is not None:
                found[text] = entry
        missing = replace(task, texts=[text for text in keys if text not in found])
        return _Lookup(task, keys, found, missing)

    async def _complete(self, lookup: _Lookup) -> None:
        """Give the task what was found and what was computed, and keep the latter."""
        task, computed = lookup.task, lookup.missing
        results = zip(computed.texts, computed.read, computed.embeddings, strict=True)
        made = {text: Entry(read, vectors) for text, read, vectors in results}
        await self._keep({lookup.keys[text]: entry for text, entry in made.items()})
        entries = lookup.found | made
        task.read = [entries[text].read for text in task.texts]
        task.embeddings = [entries[text].vectors for text in task.texts]
        task.stage, task.job = computed.stage, computed.job

    async def _keep(self, made: dict[bytes, Entry]) -> None:
        """Keep copies of entries, as far as there is room for all of them."""
        size, fitting = 0, dict[bytes, Entry]()
        for key, entry in made.items():
            older = self._entries.get(key)
            kept = entry if older is None else entry.with_kinds_of(older)
            if size + kept.nbytes <= self._entries.maxsize:
                size += kept.nbytes
                fitting[key] = kept

        def copy() -> dict[bytes, Entry]:
            return {key: entry.copied() for key, entry in fitting.items()}

        self._entries.update(await asyncio.to_thread(copy) if size > _LARGE_BYTES else copy())


def keys_of(task: ModelWork, truncation: TruncationOptions) -> dict[str, bytes]:
    """The cache's key of each distinct text of a task."""
    model = task.model
    how = (task.prompt, task.input_type, truncation.side, truncation.max_tokens)
    spaces = [str(model.spaces[kind]) for kind in sorted(model.spaces)]
    begun = hashlib.blake2b(digest_size=32, person=b"smart-embedder")
    # `repr` quotes strings, so that no two tuples have one representation.
    begun.update(repr((model.name, spaces, *how)).encode() + b"\0")
    keys = {}
    for text in dict.fromkeys(task.texts):
        digest = begun.copy()
        digest.update(text.encode())
        keys[text] = digest.digest()
    return keys
