"""Vectors that were computed before: in memory, and in a Redis behind it where there is one."""

import asyncio
import hashlib
from collections.abc import Mapping, Sequence

from cachetools import LRUCache

from app.engine.answer_memory import AnswerMemory
from app.engine.forwards.cached_vectors import CachedVectors
from app.engine.forwards.forwards import Task
from app.engine.forwards.shared_vectors import SharedVectors
from app.engine.model import Embedder
from app.engine.options import TruncationOptions
from app.observability.metrics import Metrics
from app.settings import Settings

# To copy them takes a millisecond.
_LARGE_BYTES = 2**22


class VectorCache:
    """Entries by key, the least recently used dropped first; to be used in the event loop.

    The arrays of an entry are read-only, and bit for bit those that were computed.
    """

    def __init__(self, max_bytes: int, shared: SharedVectors | None, metrics: Metrics) -> None:
        self._entries: LRUCache[str, CachedVectors] = LRUCache(max_bytes, _nbytes)
        self._shared = shared
        metrics.watch_embedding_cache(lambda: self._entries.currsize, lambda: len(self._entries))

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


def _nbytes(entry: CachedVectors) -> int:
    return entry.nbytes


def _copy_all(entries: Mapping[str, CachedVectors]) -> dict[str, CachedVectors]:
    return {key: entry.copied() for key, entry in entries.items()}
