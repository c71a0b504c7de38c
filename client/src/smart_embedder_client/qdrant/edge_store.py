"""A collection of Qdrant Edge: Qdrant's engine in this process, with a folder per collection."""

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, cast

import qdrant_edge as edge

from smart_embedder_client.qdrant.store import (
    COLBERT,
    DATASET,
    DEFAULT_EDGES,
    PAGE,
    RRF_CONSTANT,
    RRF_WEIGHTS,
    Datatype,
    Depths,
    Hit,
    Layout,
    Origin,
    Point,
    QdrantError,
    QdrantFullError,
    QdrantRefusedError,
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
    """A collection of Qdrant Edge below `root`; only `start_indexing` builds its HNSW graph."""

    streams = 1
    transport = "Qdrant Edge"
    bytes_per_number = 4

    def __init__(self, root: str | Path, collection: str) -> None:
        self._root = Path(root)
        self.collection = collection
        self._folder = self._root / collection
        self._lock = threading.Lock()
        self._shard: edge.EdgeShard | None = None
        if (self._folder / _CONFIGURATION).exists():
            with self._requesting():
                self._shard = edge.EdgeShard.load(str(self._folder))

    def open_other(self, collection: str) -> Self:
        return type(self)(self._root, collection)

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
        configuration = json.loads((self._folder / _CONFIGURATION).read_text("utf-8"))
        vectors = configuration.get("vectors") or {}
        sparse = configuration.get("sparse_vectors") or {}
        return Layout(
            {name: _read_config(params) for name, params in vectors.items()},
            {name: params.get("modifier") for name, params in sparse.items()},
        )

    def create(self, layout: Layout, origin: Origin | None) -> None:
        configuration = edge.EdgeConfig(
            vectors={name: _to_params(config) for name, config in layout.vectors.items()},
            sparse_vectors={name: edge.EdgeSparseVectorParams() for name in layout.sparse},
        )
        keyword = edge.PayloadSchemaType.Keyword
        with self._requesting():
            self._folder.mkdir(parents=True, exist_ok=True)
            # Written first: a collection without an origin counts as one of an earlier version.
            if origin is not None:
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
        converted = [
            edge.Point(point.id, _named(point.vectors), dict(point.payload)) for point in points
        ]
        with self._requesting():
            self._open_shard.update(edge.UpdateOperation.upsert_points(converted))

    def delete(self, ids: Sequence[str]) -> None:
        with self._requesting():
            self._open_shard.update(edge.UpdateOperation.delete_points(list(ids)))

    def read(self, ids: Sequence[str], *, with_vectors: bool) -> list[Point]:
        with self._requesting():
            found = self._open_shard.retrieve(
                list(ids), with_payload=True, with_vector=with_vectors
            )
        return list(map(_read_point, found))

    def sample(self, count: int) -> list[Point]:
        request = edge.QueryRequest(limit=count, query=edge.Sample.Random, with_payload=True)
        with self._requesting():
            return list(map(_read_point, self._open_shard.query(request)))

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


def _read_config(params: Mapping[str, Any]) -> VectorConfig:
    return VectorConfig(
        params["size"],
        params["distance"],
        cast("Datatype", params.get("datatype", "float32")),
        params.get("multivector_config") is not None,
        (params.get("hnsw_config") or {}).get("m"),
    )


def _to_params(config: VectorConfig) -> edge.EdgeVectorParams:
    max_sim = edge.MultiVectorConfig(edge.MultiVectorComparator.MaxSim)
    edges = DEFAULT_EDGES if config.edges is None else config.edges
    return edge.EdgeVectorParams(
        config.size,
        getattr(edge.Distance, config.distance),
        multivector_config=max_sim if config.is_multivector else None,
        datatype=_DATATYPES[config.datatype],
        hnsw_config=edge.HnswIndexConfig(edges, _EF_CONSTRUCT, _FULL_SCAN_THRESHOLD),
    )


def _named(vectors: TextVectors) -> dict[str, Any]:
    return named_vectors(vectors, edge.SparseVector)


def _read_point(record: edge.Record | edge.ScoredPoint) -> Point:
    return Point(str(record.id), read_vectors(record.vector), record.payload or {})


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
