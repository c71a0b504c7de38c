"""Qdrant Edge: Qdrant's own engine in this process, with a folder for each collection."""

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
    VectorConfig,
    Vectors,
    named_vectors,
    read_vectors,
    says_full,
)

_CONFIGURATION = "edge_config.json"
# The origin, for which Qdrant Edge has no place.
_ORIGIN = "smart_embedder.json"
_EF_CONSTRUCT, _FULL_SCAN_THRESHOLD = 100, 10_000
_DATATYPES = {
    "float32": edge.VectorStorageDatatype.Float32,
    "float16": edge.VectorStorageDatatype.Float16,
    "uint8": edge.VectorStorageDatatype.Uint8,
}


class EdgeStore:
    """A collection of Qdrant Edge in `root`; its HNSW graph is made by `start_indexing` alone."""

    streams = 1
    transport = "Qdrant Edge"
    bytes_per_number = 4

    def __init__(self, root: str | Path, collection: str) -> None:
        self._root = Path(root)
        self.collection = collection
        self._folder = self._root / collection
        self._turn = threading.Lock()
        self._shard: edge.EdgeShard | None = None
        if (self._folder / _CONFIGURATION).exists():
            with self._asking():
                self._shard = edge.EdgeShard.load(str(self._folder))

    def beside(self, collection: str) -> Self:
        return type(self)(self._root, collection)

    def resolve(self) -> None:
        """Do nothing: Qdrant Edge has no aliases."""

    @property
    def _open_shard(self) -> edge.EdgeShard:
        if self._shard is None:
            raise QdrantError(f"{self._folder} has no collection")
        return self._shard

    @contextmanager
    def _asking(self) -> Iterator[None]:
        with self._turn:
            try:
                yield
            except Exception as error:
                # The library raises nothing narrower.
                raise _failure(self._folder, error) from error

    def layout(self) -> Layout | None:
        if self._shard is None:
            return None
        told = json.loads((self._folder / _CONFIGURATION).read_text("utf-8"))
        return Layout(
            {name: _read_space(each) for name, each in (told.get("vectors") or {}).items()},
            {
                name: each.get("modifier")
                for name, each in (told.get("sparse_vectors") or {}).items()
            },
        )

    def create(self, layout: Layout, origin: Origin | None) -> None:
        configuration = edge.EdgeConfig(
            vectors={name: _params(each) for name, each in layout.vectors.items()},
            sparse_vectors={name: edge.EdgeSparseVectorParams() for name in layout.sparse},
        )
        keyword = edge.PayloadSchemaType.Keyword
        with self._asking():
            self._folder.mkdir(parents=True, exist_ok=True)
            # Before it: a collection without an origin is one of an earlier version.
            if origin is not None:
                self.note_origin(origin)
            self._shard = edge.EdgeShard.create(str(self._folder), configuration)
            self._shard.update(edge.UpdateOperation.create_field_index(DATASET, keyword))

    def origin(self) -> Origin | None:
        if self._shard is None:
            return None
        try:
            return Origin.of_metadata(json.loads((self._folder / _ORIGIN).read_text("utf-8")))
        except FileNotFoundError:
            return None

    def note_origin(self, origin: Origin) -> None:
        """Write the file at once: readers never see a part of it."""
        unfinished = self._folder / f".{_ORIGIN}.unfinished"
        unfinished.write_text(json.dumps(origin.metadata), "utf-8")
        unfinished.replace(self._folder / _ORIGIN)

    def start_indexing(self) -> None:
        """Make the HNSW graph of what is not in one yet."""
        with self._asking():
            self._open_shard.optimize()
            self._open_shard.flush()

    def existing(self, ids: Sequence[str]) -> set[str]:
        with self._asking():
            found = self._open_shard.retrieve(list(ids), with_payload=False, with_vector=False)
        return {str(each.id) for each in found}

    def upsert(self, points: Sequence[Point]) -> None:
        made = [edge.Point(each.id, _named(each.vectors), dict(each.payload)) for each in points]
        with self._asking():
            self._open_shard.update(edge.UpdateOperation.upsert_points(made))

    def delete(self, ids: Sequence[str]) -> None:
        with self._asking():
            self._open_shard.update(edge.UpdateOperation.delete_points(list(ids)))

    def read(self, ids: Sequence[str], *, with_vectors: bool) -> list[Point]:
        with self._asking():
            found = self._open_shard.retrieve(
                list(ids), with_payload=True, with_vector=with_vectors
            )
        return list(map(_read_point, found))

    def sample(self, count: int) -> list[Point]:
        request = edge.QueryRequest(limit=count, query=edge.Sample.Random, with_payload=True)
        with self._asking():
            return list(map(_read_point, self._open_shard.query(request)))

    def count(self, dataset: str | None) -> int:
        with self._asking():
            return self._open_shard.count(edge.CountRequest(filter=_of_dataset(dataset)))

    def page(self, dataset: str | None, offset: Any) -> tuple[list[str], Any]:
        request = edge.ScrollRequest(
            offset=offset,
            limit=PAGE,
            filter=_of_dataset(dataset),
            with_payload=False,
            with_vector=False,
        )
        with self._asking():
            found, following = self._open_shard.scroll(request)
        return [str(each.id) for each in found], following

    def search(self, query: Vectors, depths: Depths) -> dict[str, list[Hit]]:
        requests = _stages(query, depths)
        with self._asking():
            found = [self._open_shard.query(request) for request in requests.values()]
        return {
            stage: [Hit(str(each.id), each.score, each.payload or {}) for each in points]
            for stage, points in zip(requests, found, strict=True)
        }

    def close(self) -> None:
        """Write what is not written, and let another process open the folder."""
        if self._shard is not None:
            with self._asking():
                self._shard.close()


def _failure(folder: Path, error: Exception) -> QdrantError:
    reason = str(error)
    if says_full(reason):
        return QdrantFullError(f"Qdrant Edge in {folder}: {reason}")
    if "WouldBlock" in reason:
        return QdrantError(f"{folder} is open in another process")
    if isinstance(error, QdrantError):
        return error
    if reason.startswith("Service"):
        return QdrantError(f"Qdrant Edge in {folder} fails: {reason}")
    return QdrantRefusedError(f"Qdrant Edge in {folder} refuses it: {reason}")


def _read_space(told: Mapping[str, Any]) -> VectorConfig:
    return VectorConfig(
        told["size"],
        told["distance"],
        cast("Datatype", told.get("datatype", "float32")),
        told.get("multivector_config") is not None,
        (told.get("hnsw_config") or {}).get("m"),
    )


def _params(space: VectorConfig) -> edge.EdgeVectorParams:
    max_sim = edge.MultiVectorConfig(edge.MultiVectorComparator.MaxSim)
    edges = DEFAULT_EDGES if space.edges is None else space.edges
    return edge.EdgeVectorParams(
        space.size,
        getattr(edge.Distance, space.distance),
        multivector_config=max_sim if space.is_multivector else None,
        datatype=_DATATYPES[space.datatype],
        hnsw_config=edge.HnswIndexConfig(edges, _EF_CONSTRUCT, _FULL_SCAN_THRESHOLD),
    )


def _named(vectors: Vectors) -> dict[str, Any]:
    return named_vectors(vectors, edge.SparseVector)


def _read_point(found: edge.Record | edge.ScoredPoint) -> Point:
    return Point(str(found.id), read_vectors(found.vector), found.payload or {})


def _of_dataset(dataset: str | None) -> edge.Filter | None:
    if dataset is None:
        return None
    return edge.Filter(must=[edge.FieldCondition(DATASET, match=edge.MatchValue(dataset))])


def _stages(query: Vectors, depths: Depths) -> dict[str, edge.QueryRequest]:
    """A request for each stage, each of which repeats those below it."""
    nearest = {name: edge.Query.Nearest(each, using=name) for name, each in _named(query).items()}
    colbert = nearest.pop(COLBERT, None)
    first = [edge.Prefetch(depths.candidates, each) for each in nearest.values()]
    weights = [RRF_WEIGHTS[name] for name in nearest]
    # The stubs do not say that it is a Fusion.
    rrf = cast("edge.Fusion", edge.Fusion.Rrf(RRF_CONSTANT, weights))
    requests = {
        name: edge.QueryRequest(limit=depths.candidates, query=each)
        for name, each in nearest.items()
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
