"""A cache of vectors in memory, so that repeated texts are not computed again.

An entry holds the tokens and the vectors of one text. Its key is a hash of the text and of all
options that the vectors depend on. A request uses the entries that have all kinds of vectors that
it asks for, computes its other texts, and adds their vectors to the cache. When the entries exceed
the memory limit, the least recently used are dropped.
"""

import asyncio
import hashlib
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from cachetools import LRUCache

from smart_embedder.errors import InvalidRequestError
from smart_embedder.metrics import EngineMetrics
from smart_embedder.pipelines.embedding import (
    EmbeddingPipeline,
    ModelWork,
    find_truncations,
    reserve_vectors,
)
from smart_embedder.pipelines.validation import check_truncations
from smart_embedder.requests import EmbedRequest, Outputs, TruncationOptions
from smart_embedder.results import TextEmbedding, copy_embeddings
from smart_embedder.scheduling.admission import Admission, ConcurrencyLimit
from smart_embedder.tokens import TokenizedText
from smart_embedder.vector_space import VECTORS

# Copying this many bytes takes a millisecond; more are copied off the event loop.
_LARGE_BYTES = 2**22
# Hashing this many characters takes 0.1 milliseconds; more are hashed off the event loop.
_LARGE_CHARACTERS = 100_000
# The Python objects of an entry and of its key.
_OVERHEAD_BYTES = 1200


@dataclass(frozen=True, slots=True)
class Entry:
    """The tokens and the vectors of one text."""

    read: TokenizedText
    vectors: TextEmbedding

    @property
    def nbytes(self) -> int:
        """The bytes of memory that the entry uses."""
        return self.vectors.nbytes + self.read.ids.nbytes + _OVERHEAD_BYTES

    def select(self, outputs: Outputs) -> "Entry | None":
        """Return the entry with only these kinds of vectors; None if it lacks one of them."""
        kinds = {kind: getattr(self.vectors, kind) for kind in VECTORS if getattr(outputs, kind)}
        if any(vectors is None for vectors in kinds.values()):
            return None
        return Entry(self.read, TextEmbedding(**kinds))

    def merge(self, older: "Entry") -> "Entry":
        """Return the entry with the kinds of vectors added that only the older one has."""
        kinds = {}
        for kind in VECTORS:
            vectors = getattr(self.vectors, kind)
            kinds[kind] = getattr(older.vectors, kind) if vectors is None else vectors
        return Entry(self.read, TextEmbedding(**kinds))

    def copy(self) -> "Entry":
        """Return a read-only copy, because the arrays may be views of those of a whole batch."""
        ids = self.read.ids.copy()
        (vectors,) = copy_embeddings([self.vectors])
        for array in (ids, *vectors.arrays):
            if array is not None:
                array.flags.writeable = False
        return Entry(replace(self.read, ids=ids), vectors)


@dataclass(frozen=True, slots=True)
class _Lookup:
    """The entries found for the texts of `work`, and the work for the missing texts.

    `keys` maps each distinct text to its key in the cache.
    """

    work: ModelWork
    keys: dict[Any, bytes]
    found: dict[Any, Entry]
    missing: ModelWork


class CachedPipeline(EmbeddingPipeline):
    """An embedding pipeline that computes only texts without a cache entry.

    Cached vectors are bit-identical to the computed ones. Cached texts are neither tokenized nor
    queued. Use it in the event loop's thread only.
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
        """The bytes of memory that the entries use."""
        return int(self._entries.currsize)

    @property
    def count(self) -> int:
        """The number of entries, one for each text and model."""
        return len(self._entries)

    async def compute(self, works: list[ModelWork], request: EmbedRequest) -> None:
        """Look up the texts in the cache, and compute the missing ones."""
        keys = await self._hash_texts(works, request)
        lookups = [self._look_up(*pair) for pair in zip(works, keys, strict=True)]
        missing = [lookup.missing for lookup in lookups if lookup.missing.texts]
        self._metrics.cached(
            hits=sum(len(lookup.found) for lookup in lookups),
            misses=sum(len(work.texts) for work in missing),
        )
        if missing:
            try:
                await super().compute(missing, request)
            except InvalidRequestError:
                # The numbers in this error count only the missing texts: compute all texts, so that
                # the error counts all.
                await super().compute(works, request)
                return
        for lookup in lookups:
            await self._complete(lookup)
        if not request.truncation.truncate:
            check_truncations(find_truncations(works, request), request.truncation)
        reserve_vectors(works, request.answer)

    async def _hash_texts(
        self, works: list[ModelWork], request: EmbedRequest
    ) -> list[dict[Any, bytes]]:
        def hash_texts() -> list[dict[Any, bytes]]:
            return [make_keys(work, request.truncation) for work in works]

        texts = [text for work in works for text in work.texts]
        if sum(map(len, texts)) <= _LARGE_CHARACTERS:
            return hash_texts()
        return await self._admission.threads.run(hash_texts, texts, request.client)

    def _look_up(self, work: ModelWork, keys: dict[Any, bytes]) -> _Lookup:
        """Find the entries with all kinds of vectors that are asked for."""
        found = {}
        for text, key in keys.items():
            cached = self._entries.get(key)
            if cached is not None and (entry := cached.select(work.outputs)) is not None:
                found[text] = entry
        missing = replace(work, texts=[text for text in keys if text not in found])
        return _Lookup(work, keys, found, missing)

    async def _complete(self, lookup: _Lookup) -> None:
        """Complete the work with the found and the computed entries, and cache the latter."""
        work, computed = lookup.work, lookup.missing
        results = zip(computed.texts, computed.read, computed.embeddings, strict=True)
        new = {text: Entry(read, vectors) for text, read, vectors in results}
        await self._store({lookup.keys[text]: entry for text, entry in new.items()})
        entries = lookup.found | new
        work.read = [entries[text].read for text in work.texts]
        work.embeddings = [entries[text].vectors for text in work.texts]
        work.stage, work.job = computed.stage, computed.job

    async def _store(self, entries: dict[bytes, Entry]) -> None:
        """Store copies of the entries, as many as fit into the cache together."""
        size, fitting = 0, dict[bytes, Entry]()
        for key, entry in entries.items():
            older = self._entries.get(key)
            merged = entry if older is None else entry.merge(older)
            if size + merged.nbytes <= self._entries.maxsize:
                size += merged.nbytes
                fitting[key] = merged

        def copy() -> dict[bytes, Entry]:
            return {key: entry.copy() for key, entry in fitting.items()}

        self._entries.update(await asyncio.to_thread(copy) if size > _LARGE_BYTES else copy())


def make_keys(work: ModelWork, truncation: TruncationOptions) -> dict[Any, bytes]:
    """Return the cache key of each distinct text or picture."""
    model = work.model
    options = (work.prompt, work.input_type, truncation.side, truncation.max_tokens)
    spaces = [str(model.spaces[kind]) for kind in sorted(model.spaces)]
    prefix = hashlib.blake2b(digest_size=32, person=b"smart-embedder")
    # `repr` quotes strings, so that different options never have the same bytes.
    prefix.update(repr((model.name, spaces, *options)).encode() + b"\0")
    keys = {}
    for text in dict.fromkeys(work.texts):
        digest = prefix.copy()
        # No text in UTF-8 has the byte 255.
        digest.update(text.encode() if isinstance(text, str) else b"\xff" + text.read())
        keys[text] = digest.digest()
    return keys
