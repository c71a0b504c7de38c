"""Qdrant's engine in Python behind one lock, with the faults that it is told to have."""

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
    """What happens to the next `times` uploads.

    With `after` the points are stored; then `seconds` go by, and `status` is answered with `reason`
    and `headers`. With `text`, it happens to uploads alone that have this in a text.
    """

    times: int = 1_000_000
    seconds: float = 0.0
    status: int = 200
    reason: str = "told to fail"
    headers: dict[str, str] = field(default_factory=dict)
    text: str | None = None
    after: bool = False


@dataclass
class Collection:
    """What a collection was sent, and the graphs that the engine in Python does not have."""

    uploads: Counter[str] = field(default_factory=Counter)
    largest_upload: int = 0
    # Changes over HTTP, from the first line to the answer; and uploads that have been read.
    requests: int = 0
    streams: int = 0
    most_streams: int = 0
    faults: int = 0
    graphs: dict[str, int] = field(default_factory=dict)


@dataclass
class Engine:
    """The local engine, one call at a time."""

    client: QdrantClient = field(default_factory=lambda: QdrantClient(":memory:"))
    turn: Any = field(default_factory=threading.RLock)
    fault: Fault = field(default_factory=lambda: Fault(times=0))
    collections: defaultdict[str, Collection] = field(
        default_factory=lambda: defaultdict(Collection)
    )

    def own_name(self, name: str) -> str:
        """That of the collection which a name, or an alias, means."""
        with self.turn:
            aliases = self.client.get_aliases().aliases
        return next((each.collection_name for each in aliases if each.alias_name == name), name)

    @contextmanager
    def upload(self, name: str, points: list[q.PointStruct], size: int) -> Iterator[Fault | None]:
        """Count an upload; the fault that it meets."""
        collection = self.collections[self.own_name(name)]
        with self.turn:
            collection.streams += 1
            collection.most_streams = max(collection.streams, collection.most_streams)
            collection.largest_upload = max(size, collection.largest_upload)
        try:
            yield self._next_fault(collection, points)
        finally:
            with self.turn:
                collection.streams -= 1

    def _next_fault(self, collection: Collection, points: list[q.PointStruct]) -> Fault | None:
        texts = [str((point.payload or {}).get("text")) for point in points]
        with self.turn:
            hit = self.fault.text is None or any(self.fault.text in each for each in texts)
            if not hit or self.fault.times == 0:
                return None
            self.fault.times -= 1
            collection.faults += 1
            return self.fault

    def store(self, name: str, points: list[q.PointStruct]) -> None:
        """Store points, under the limit that the engine in Python does not have."""
        for point in points:
            colbert = (point.vector or {}).get("colbert")  # type: ignore[union-attr]
            if colbert and len(colbert) * len(colbert[0]) >= MULTIVECTOR_NUMBERS:
                raise RefusedError("multivector is too large")
        own_name = self.own_name(name)
        with self.turn:
            self.client.upsert(name, points)
            self.collections[own_name].uploads.update(str(point.id) for point in points)

    def update(self, name: str, graphs: dict[str, int], metadata: Any) -> bool:
        """Change the graphs of vectors, or metadata."""
        with self.turn:
            self.collections[name].graphs.update(graphs)
            return self.client.update_collection(name, metadata=metadata)

    def describe(self, name: str) -> q.CollectionInfo:
        """The collection with its graphs."""
        with self.turn:
            info = self.client.get_collection(name)
        for vector, edges in self.collections[self.own_name(name)].graphs.items():
            info.config.params.vectors[vector].hnsw_config = q.HnswConfigDiff(m=edges)
        return info
