"""A collection of Qdrant Edge: Qdrant's engine in this process, with a folder per collection."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import qdrant_edge as edge

from smart_embedder_client.qdrant.store import (
    COLBERT,
    DATASET,
    DEFAULT_EDGES,
    EDGE,
    PAGE,
    RRF_CONSTANT,
    RRF_WEIGHTS,
    Depths,
    Hit,
    Layout,
    Origin,
    Point,
    QdrantError,
    QdrantFullError,
    QdrantRefusedError,
    Target,
    TextVectors,
    VectorConfig,
    is_disk_full,
    named_vectors,
    read_vectors,
)

_CONFIGURATION = "edge_config.json"
# The origin has a file of its own, since collections of Qdrant Edge have no metadata.
_ORIGIN = "smart_embedder.json"
_EF_CONSTRUCT, _FULL_SCAN_THRESHOLD = 100, 10_000
_DATATYPES = {
    "float32": edge.VectorStorageDatatype.Float32,
    "float16": edge.VectorStorageDatatype.Float16,
    "uint8": edge.VectorStorageDatatype.Uint8,
}


class EdgeStore:
    """A collection of Qdrant Edge; only `start_indexing` builds its HNSW graph."""

    transport = "Qdrant Edge"
    bytes_per_number = 4

    def __init__(self, target: Target) -> None:
        self.collection = target.collection
        self._folder = Path(target.address.removeprefix(EDGE), target.collection)
        self._lock = threading.Lock()
        self._shard: edge.EdgeShard | None = None
        if (self._folder / _CONFIGURATION).exists():
            with self._requesting():
                self._shard = edge.EdgeShard.load(str(self._folder))

    def resolve_alias(self) -> None:
        """Do nothing: Qdrant Edge has no aliases."""

    @property
    def _open_shard(self) -> edge.EdgeShard:
        if self._shard is None:
            raise QdrantError(f"{self._folder} has no collection")
        return self._shard

    @contextmanager
    def _requesting(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except Exception as error:
                # The library raises plain exceptions.
                raise _to_qdrant_error(self._folder, error) from error

    def layout(self) -> Layout | None:
        if self._shard is None:
            return None
        configuration = (self._folder / _CONFIGURATION).read_text("utf-8")
        return Layout.of_parameters(json.loads(configuration))

    def create(self, layout: Layout, origin: Origin) -> None:
        configuration = edge.EdgeConfig(
            vectors={name: _to_params(config) for name, config in layout.vectors.items()},
            sparse_vectors={name: edge.EdgeSparseVectorParams() for name in layout.sparse},
        )
        keyword = edge.PayloadSchemaType.Keyword
        with self._requesting():
            self._folder.mkdir(parents=True, exist_ok=True)
            # Written first: a collection without an origin is not known to have these vectors.
            self.set_origin(origin)
            self._shard = edge.EdgeShard.create(str(self._folder), configuration)
            self._shard.update(edge.UpdateOperation.create_field_index(DATASET, keyword))

    def origin(self) -> Origin | None:
        if self._shard is None:
            return None
        try:
            return Origin.of_metadata(json.loads((self._folder / _ORIGIN).read_text("utf-8")))
        except FileNotFoundError:
            return None

    def set_origin(self, origin: Origin) -> None:
        """Replace the file atomically."""
        unfinished = self._folder / f".{_ORIGIN}.unfinished"
        unfinished.write_text(json.dumps(origin.metadata), "utf-8")
        unfinished.replace(self._folder / _ORIGIN)

    def start_indexing(self) -> None:
        """Build the HNSW graph for the points that are not in one yet."""
        with self._requesting():
            self._open_shard.optimize()
            self._open_shard.flush()

    def existing(self, ids: Sequence[str]) -> set[str]:
        with self._requesting():
            found = self._open_shard.retrieve(list(ids), with_payload=False, with_vector=False)
        return {str(record.id) for record in found}

    def upsert(self, points: Sequence[Point]) -> None:
        with self._requesting():
            # Converted here: other uploads, which wait, take no memory for it.
            converted = [
                edge.Point(point.id, _named(point.vectors), dict(point.payload)) for point in points
            ]
            self._open_shard.update(edge.UpdateOperation.upsert_points(converted))

    def delete(self, ids: Sequence[str]) -> None:
        with self._requesting():
            self._open_shard.update(edge.UpdateOperation.delete_points(list(ids)))

    def read(self, ids: Sequence[str], *, with_vectors: bool) -> list[Point]:
        with self._requesting():
            found = self._open_shard.retrieve(
                list(ids), with_payload=True, with_vector=with_vectors
            )
        return [
            Point(str(record.id), read_vectors(record.vector), record.payload or {})
            for record in found
        ]

    def count(self, dataset: str | None) -> int:
        with self._requesting():
            return self._open_shard.count(edge.CountRequest(filter=_dataset_filter(dataset)))

    def page(self, dataset: str | None, offset: Any) -> tuple[list[str], Any]:
        request = edge.ScrollRequest(
            offset=offset,
            limit=PAGE,
            filter=_dataset_filter(dataset),
            with_payload=False,
            with_vector=False,
        )
        with self._requesting():
            found, following = self._open_shard.scroll(request)
        return [str(record.id) for record in found], following

    def search(self, query: TextVectors, depths: Depths) -> dict[str, list[Hit]]:
        requests = _to_stages(query, depths)
        with self._requesting():
            found = [self._open_shard.query(request) for request in requests.values()]
        return {
            stage: [Hit(str(point.id), point.score, point.payload or {}) for point in points]
            for stage, points in zip(requests, found, strict=True)
        }

    def close(self) -> None:
        """Write pending data, and release the folder for other processes."""
        if self._shard is not None:
            with self._requesting():
                self._shard.close()


def _to_qdrant_error(folder: Path, error: Exception) -> QdrantError:
    reason = str(error)
    if is_disk_full(reason):
        return QdrantFullError(f"Qdrant Edge in {folder}: {reason}")
    if "WouldBlock" in reason:
        return QdrantError(f"{folder} is open in another process")
    if isinstance(error, QdrantError):
        return error
    if reason.startswith("Service"):
        return QdrantError(f"Qdrant Edge in {folder} fails: {reason}")
    return QdrantRefusedError(f"Qdrant Edge in {folder} refuses it: {reason}")


def _to_params(config: VectorConfig) -> edge.EdgeVectorParams:
    max_sim = edge.MultiVectorConfig(edge.MultiVectorComparator.MaxSim)
    # ColBERT vectors only rescore.
    edges = 0 if config.is_multivector else DEFAULT_EDGES
    return edge.EdgeVectorParams(
        config.size,
        getattr(edge.Distance, config.distance),
        multivector_config=max_sim if config.is_multivector else None,
        datatype=_DATATYPES[config.datatype],
        hnsw_config=edge.HnswIndexConfig(edges, _EF_CONSTRUCT, _FULL_SCAN_THRESHOLD),
    )


def _named(vectors: TextVectors) -> dict[str, Any]:
    return named_vectors(vectors, edge.SparseVector)


def _dataset_filter(dataset: str | None) -> edge.Filter | None:
    if dataset is None:
        return None
    return edge.Filter(must=[edge.FieldCondition(DATASET, match=edge.MatchValue(dataset))])


def _to_stages(query: TextVectors, depths: Depths) -> dict[str, edge.QueryRequest]:
    """Return a request for each stage, which repeats the stages below it."""
    queries = {
        name: edge.Query.Nearest(vector, using=name) for name, vector in _named(query).items()
    }
    colbert = queries.pop(COLBERT, None)
    first = [edge.Prefetch(depths.candidates, nearest) for nearest in queries.values()]
    weights = [RRF_WEIGHTS[name] for name in queries]
    # The type stubs lack that it is a Fusion.
    rrf = cast("edge.Fusion", edge.Fusion.Rrf(RRF_CONSTANT, weights))
    requests = {
        name: edge.QueryRequest(limit=depths.candidates, query=nearest)
        for name, nearest in queries.items()
    }
    requests["fused"] = edge.QueryRequest(
        limit=depths.fused, query=rrf, prefetches=first, with_payload=True
    )
    if colbert is not None:
        fused = edge.Prefetch(depths.fused, rrf, prefetches=first)
        requests[COLBERT] = edge.QueryRequest(
            limit=depths.limit, query=colbert, prefetches=[fused], with_payload=True
        )
    return requests
