"""Qdrant's local engine in Python, behind one lock, with faults that tests set."""

import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from qdrant_client import QdrantClient
from qdrant_client import models as q

MULTIVECTOR_NUMBERS = 1_048_576


class RefusedError(Exception):
    """A point cannot be stored."""


@dataclass
class Fault:
    """A fault of the next `times` uploads.

    After `seconds` the response is `status` with `reason` and `headers`. With `after` the points
    are stored before that. With `text` only uploads with this in a text have the fault.
    """

    times: int = 1_000_000
    seconds: float = 0.0
    status: int = 200
    reason: str = "a fault set by the test"
    headers: dict[str, str] = field(default_factory=dict)
    text: str | None = None
    after: bool = False


@dataclass
class Collection:
    """Counts what a collection was sent, and keeps the graphs that the local engine lacks."""

    uploads: Counter[str] = field(default_factory=Counter)
    largest_upload: int = 0
    # Running PUT requests over HTTP, and uploads that have been read.
    requests: int = 0
    streams: int = 0
    most_streams: int = 0
    faults: int = 0
    graphs: dict[str, int] = field(default_factory=dict)


@dataclass
class QdrantEngine:
    """The local engine, which takes one call at a time."""

    client: QdrantClient = field(default_factory=lambda: QdrantClient(":memory:"))
    lock: Any = field(default_factory=threading.RLock)
    fault: Fault = field(default_factory=lambda: Fault(times=0))
    collections: defaultdict[str, Collection] = field(
        default_factory=lambda: defaultdict(Collection)
    )

    def resolve(self, name: str) -> str:
        """Return the name of the collection for a name or an alias."""
        with self.lock:
            aliases = self.client.get_aliases().aliases
        return next((alias.collection_name for alias in aliases if alias.alias_name == name), name)

    @contextmanager
    def upload(self, name: str, points: list[q.PointStruct], size: int) -> Iterator[Fault | None]:
        """Count an upload; yields its fault, if there is one."""
        collection = self.collections[self.resolve(name)]
        with self.lock:
            collection.streams += 1
            collection.most_streams = max(collection.streams, collection.most_streams)
            collection.largest_upload = max(size, collection.largest_upload)
        try:
            yield self._next_fault(collection, points)
        finally:
            with self.lock:
                collection.streams -= 1

    def _next_fault(self, collection: Collection, points: list[q.PointStruct]) -> Fault | None:
        texts = [str((point.payload or {}).get("text")) for point in points]
        with self.lock:
            hit = self.fault.text is None or any(self.fault.text in text for text in texts)
            if not hit or self.fault.times == 0:
                return None
            self.fault.times -= 1
            collection.faults += 1
            return self.fault

    def store(self, name: str, points: list[q.PointStruct]) -> None:
        """Store points, with a limit of Qdrant that the local engine lacks."""
        for point in points:
            colbert = (point.vector or {}).get("colbert")  # type: ignore[union-attr]
            if colbert and len(colbert) * len(colbert[0]) >= MULTIVECTOR_NUMBERS:
                raise RefusedError("multivector is too large")
        collection = self.resolve(name)
        with self.lock:
            self.client.upsert(name, points)
            self.collections[collection].uploads.update(str(point.id) for point in points)

    def update(self, name: str, graphs: dict[str, int], metadata: Any) -> bool:
        """Change the graphs of vectors, or metadata."""
        with self.lock:
            self.collections[name].graphs.update(graphs)
            return self.client.update_collection(name, metadata=metadata)

    def describe(self, name: str) -> q.CollectionInfo:
        """Return the information about a collection, with its graphs."""
        with self.lock:
            info = self.client.get_collection(name)
        for vector, edges in self.collections[self.resolve(name)].graphs.items():
            info.config.params.vectors[vector].hnsw_config = q.HnswConfigDiff(m=edges)
        return info
