"""Qdrant Edge: Qdrant's own engine in this process, with a folder for each collection."""

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import qdrant_edge as edge

from smart_embedder_client.qdrant.store import (
    COLBERT,
    DATASET,
    DEFAULT_EDGES,
    PAGE,
    Datatype,
    Depths,
    Hit,
    Layout,
    Point,
    QdrantError,
    QdrantFullError,
    QdrantRefusedError,
    Vectors,
    VectorSpace,
    named_vectors,
    says_full,
)

_CONFIGURATION = "edge_config.json"
_EF_CONSTRUCT, _FULL_SCAN_THRESHOLD = 100, 10_000
# Qdrant's own default.
_RRF_K = 2
_DATATYPES = {
    "float32": edge.VectorStorageDatatype.Float32,
    "float16": edge.VectorStorageDatatype.Float16,
    "uint8": edge.VectorStorageDatatype.Uint8,
}


class EdgeStore:
    """A collection of Qdrant Edge in `folder`; its HNSW graph is made by `start_indexing` alone."""

    streams = 1
    transport = "Qdrant Edge"
    bytes_per_number = 4

    def __init__(self, folder: str, collection: str) -> None:
        self._folder = Path(folder, collection)
        self._turn = threading.Lock()
        self._shard: edge.EdgeShard | None = None
        if (self._folder / _CONFIGURATION).exists():
            with self._asking():
                self._shard = edge.EdgeShard.load(str(self._folder))

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
        """The vectors of the collection; None if it does not exist."""
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

    def create(self, layout: Layout) -> None:
        """Make the collection."""
        configuration = edge.EdgeConfig(
            vectors={name: _params(each) for name, each in layout.vectors.items()},
            sparse_vectors={name: edge.EdgeSparseVectorParams() for name in layout.sparse},
        )
        keyword = edge.PayloadSchemaType.Keyword
        with self._asking():
            self._folder.mkdir(parents=True, exist_ok=True)
            self._shard = edge.EdgeShard.create(str(self._folder), configuration)
            self._shard.update(edge.UpdateOperation.create_field_index(DATASET, keyword))

    def start_indexing(self) -> None:
        """Make the HNSW graph of what is not in one yet."""
        with self._asking():
            self._open_shard.optimize()
            self._open_shard.flush()

    def existing(self, ids: Sequence[str]) -> set[str]:
        """Those of the points that the collection has."""
        with self._asking():
            found = self._open_shard.retrieve(list(ids), with_payload=False, with_vector=False)
        return {str(each.id) for each in found}

    def upsert(self, points: Sequence[Point]) -> None:
        """Store points."""
        made = [edge.Point(each.id, _named(each.vectors), dict(each.payload)) for each in points]
        with self._asking():
            self._open_shard.update(edge.UpdateOperation.upsert_points(made))

    def delete(self, ids: Sequence[str]) -> None:
        """Remove points."""
        with self._asking():
            self._open_shard.update(edge.UpdateOperation.delete_points(list(ids)))

    def count(self, dataset: str) -> int:
        """How many points a data set has."""
        with self._asking():
            return self._open_shard.count(edge.CountRequest(filter=_of_dataset(dataset)))

    def pages(self, dataset: str) -> Iterator[list[str]]:
        """The ids of the points of a data set."""
        offset = None
        while True:
            request = edge.ScrollRequest(
                offset=offset,
                limit=PAGE,
                filter=_of_dataset(dataset),
                with_payload=False,
                with_vector=False,
            )
            with self._asking():
                found, offset = self._open_shard.scroll(request)
            yield [str(each.id) for each in found]
            if offset is None:
                return

    def any_payload(self) -> Mapping[str, Any] | None:
        """The payload of some point; None if there is no point."""
        with self._asking():
            found, _ = self._open_shard.scroll(edge.ScrollRequest(limit=1, with_payload=True))
        return (found[0].payload or {}) if found else None

    def search(self, query: Vectors, depths: Depths) -> dict[str, list[Hit]]:
        """The points of each stage by falling score, as `Store` says."""
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


def _read_space(told: Mapping[str, Any]) -> VectorSpace:
    return VectorSpace(
        told["size"],
        told["distance"],
        cast("Datatype", told.get("datatype", "float32")),
        told.get("multivector_config") is not None,
        (told.get("hnsw_config") or {}).get("m"),
    )


def _params(space: VectorSpace) -> edge.EdgeVectorParams:
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


def _of_dataset(dataset: str) -> edge.Filter:
    return edge.Filter(must=[edge.FieldCondition(DATASET, match=edge.MatchValue(dataset))])


def _stages(query: Vectors, depths: Depths) -> dict[str, edge.QueryRequest]:
    """A request for each stage, each of which repeats those below it."""
    nearest = {name: edge.Query.Nearest(each, using=name) for name, each in _named(query).items()}
    colbert = nearest.pop(COLBERT, None)
    first = [edge.Prefetch(depths.candidates, each) for each in nearest.values()]
    # The stubs do not say that it is a Fusion.
    rrf = cast("edge.Fusion", edge.Fusion.Rrf(k=_RRF_K))
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
