"""Qdrant by its own Python client: a server over gRPC or HTTP, a folder, or memory."""

import copy
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, cast
from urllib.parse import urlsplit

import grpc
import httpx
from qdrant_client import QdrantClient
from qdrant_client import grpc as q_grpc
from qdrant_client import models as q
from qdrant_client.common.client_exceptions import ResourceExhaustedResponse
from qdrant_client.conversions.conversion import RestToGrpc
from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

from smart_embedder_client.qdrant.store import (
    COLBERT,
    DATASET,
    DEFAULT_EDGES,
    DENSE,
    PAGE,
    RRF_CONSTANT,
    RRF_WEIGHTS,
    SOURCE,
    SPARSE,
    Datatype,
    Depths,
    Hit,
    Layout,
    Origin,
    Point,
    QdrantBusyError,
    QdrantError,
    QdrantFullError,
    QdrantRefusedError,
    Target,
    VectorConfig,
    Vectors,
    as_lists,
    named_vectors,
    read_vectors,
    says_full,
)

_REFUSED = {400, 413, 422}
_BUSY = {408, 429, 500, 502, 503, 504}
_INSUFFICIENT_STORAGE = 507
_LONGEST_REASON = 300

_Code = grpc.StatusCode
_GRPC_REFUSED = {_Code.INVALID_ARGUMENT, _Code.FAILED_PRECONDITION, _Code.OUT_OF_RANGE}
_GRPC_BUSY = {
    _Code.UNAVAILABLE,
    _Code.DEADLINE_EXCEEDED,
    _Code.RESOURCE_EXHAUSTED,
    _Code.INTERNAL,
    _Code.UNKNOWN,
    _Code.ABORTED,
}
IN_MEMORY = ":memory:"
_GRPC = "gRPC"
_GRPC_PROBE_SECONDS = 5
# JSON has a float32 in about 20 characters, and gRPC in its 4 bytes.
_JSON_BYTES, _GRPC_BYTES = 22, 4
_SERVER_STREAMS = 64


@contextmanager
def qdrant_failures(address: str) -> Iterator[None]:
    """Raise what Qdrant's client raises as `QdrantError`."""
    try:
        yield
    except UnexpectedResponse as error:
        raise _of_status(address, error.status_code or 0, _reason(error)) from error
    except ResourceExhaustedResponse as error:
        detail = f"Qdrant at {address} has no room for more requests: {error}"
        raise QdrantBusyError(detail, error.retry_after_s) from error
    except ResponseHandlingException as error:
        raise _of_transport(address, error.source) from error
    except grpc.RpcError as error:
        raise _of_grpc(address, error.code(), str(error.details())) from error
    except ValueError as error:  # Of the local engine.
        raise QdrantRefusedError(f"Qdrant at {address} refuses it: {error}") from error


def _of_status(address: str, status: int, reason: str) -> QdrantError:
    told = f"Qdrant at {address} answers {status}: {reason}"
    if status == _INSUFFICIENT_STORAGE or says_full(reason):
        return QdrantFullError(told)
    if status in _REFUSED:
        return QdrantRefusedError(told)
    return QdrantBusyError(told) if status in _BUSY else QdrantError(told)


def _of_grpc(address: str, code: grpc.StatusCode, reason: str) -> QdrantError:
    told = f"Qdrant at {address} answers {code.name}: {reason[:_LONGEST_REASON]}"
    if says_full(reason):
        return QdrantFullError(told)
    if code in _GRPC_REFUSED or "message larger" in reason:
        return QdrantRefusedError(told)
    return QdrantBusyError(told) if code in _GRPC_BUSY else QdrantError(told)


def _of_transport(address: str, source: Exception) -> QdrantError:
    if isinstance(source, httpx.TimeoutException):
        return QdrantBusyError(f"Qdrant at {address} did not answer in time")
    if isinstance(source, httpx.TransportError):
        return QdrantBusyError(f"no connection to Qdrant at {address}: {source}")
    return QdrantError(f"what answers at {address} is not Qdrant: {source}")


def _reason(error: UnexpectedResponse) -> str:
    """Qdrant's own words, else the beginning of what answered."""
    try:
        return str(error.structured()["status"]["error"])
    except (ValueError, KeyError, TypeError):
        return error.content.decode(errors="replace")[:_LONGEST_REASON] or error.reason_phrase


def to_struct(point: Point) -> q.PointStruct:
    """A point for JSON, and for the engine in Python."""
    payload = cast("dict[str, Any]", point.payload)
    return q.PointStruct(id=point.id, vector=_named(point.vectors), payload=payload)


def to_message(point: Point) -> q_grpc.PointStruct:
    """A point for gRPC, in a quarter of the time and memory that the client would need for it."""
    vectors = point.vectors
    named: dict[str, q_grpc.Vector] = {}
    if vectors.dense is not None:
        named[DENSE] = q_grpc.Vector(dense=q_grpc.DenseVector(data=as_lists(vectors.dense)))
    if vectors.sparse is not None:
        indices, values = vectors.sparse.indices.tolist(), vectors.sparse.values.tolist()
        sparse = q_grpc.SparseVector(indices=indices, values=values)
        named[SPARSE] = q_grpc.Vector(sparse=sparse)
    if vectors.colbert is not None:
        rows = [q_grpc.DenseVector(data=as_lists(row)) for row in vectors.colbert]
        named[COLBERT] = q_grpc.Vector(multi_dense=q_grpc.MultiDenseVector(vectors=rows))
    return q_grpc.PointStruct(
        id=q_grpc.PointId(uuid=point.id),
        vectors=q_grpc.Vectors(vectors=q_grpc.NamedVectors(vectors=named)),
        payload=RestToGrpc.convert_payload(cast("dict[str, Any]", point.payload)),
    )


def _named(vectors: Vectors) -> dict[str, Any]:
    return named_vectors(vectors, lambda ids, values: q.SparseVector(indices=ids, values=values))


def to_stages(query: Vectors, depths: Depths) -> dict[str, q.QueryRequest]:
    """A request for each stage, for each of which Qdrant repeats those below it."""
    named = _named(query)
    colbert = named.pop(COLBERT, None)
    first = {
        name: q.Prefetch(query=vector, using=name, limit=depths.candidates)
        for name, vector in named.items()
    }
    weights = [RRF_WEIGHTS[name] for name in first]
    rrf = q.RrfQuery(rrf=q.Rrf(k=RRF_CONSTANT, weights=weights))
    requests = {
        name: q.QueryRequest(query=each.query, using=name, limit=each.limit)
        for name, each in first.items()
    }
    requests["fused"] = q.QueryRequest(
        prefetch=list(first.values()), query=rrf, limit=depths.fused, with_payload=True
    )
    if colbert is not None:
        fused = q.Prefetch(prefetch=list(first.values()), query=rrf, limit=depths.fused)
        requests[COLBERT] = q.QueryRequest(
            prefetch=fused, query=colbert, using=COLBERT, limit=depths.limit, with_payload=True
        )
    return requests


def is_server(address: str) -> bool:
    """Whether an address is that of a server, and no path."""
    return urlsplit(address).scheme in {"http", "https"}


class ClientStore:
    """A collection that Qdrant's Python client reaches."""

    def __init__(self, target: Target) -> None:
        self._address = target.address
        self.collection = target.collection
        self._timeout = target.timeout
        self.owns_connections = True
        self._is_server = is_server(target.address)
        # Qdrant's engine in Python is made for one thread at a time.
        self._turn = threading.Semaphore(_SERVER_STREAMS if self._is_server else 1)
        self.streams = _SERVER_STREAMS if self._is_server else 1
        with qdrant_failures(target.address):
            self._client, self.transport = self._connect(target)
        self.bytes_per_number = _GRPC_BYTES if self.transport == _GRPC else _JSON_BYTES

    def _connect(self, target: Target) -> tuple[QdrantClient, str]:
        if not self._is_server:
            return _open_locally(self._address), "Qdrant's engine in Python"
        options: dict[str, Any] = {
            "url": target.address,
            "api_key": target.api_key,
            "timeout": target.timeout,
            "check_compatibility": False,
        }
        if target.use_grpc:
            client = QdrantClient(prefer_grpc=True, grpc_port=target.grpc_port, **options)
            if self._answers_grpc(client):
                return client, _GRPC
            client.close()
        return QdrantClient(**options), "HTTP"

    def beside(self, collection: str) -> Self:
        """Another collection by the same connections, which stay open when it is closed."""
        other = copy.copy(self)
        other.collection, other.owns_connections = collection, False
        return other

    def _answers_grpc(self, client: QdrantClient) -> bool:
        request = q_grpc.CollectionExistsRequest(collection_name=self.collection)
        try:
            with qdrant_failures(self._address):
                client.grpc_collections.CollectionExists(request, timeout=_GRPC_PROBE_SECONDS)
        except QdrantError:
            return False
        return True

    @contextmanager
    def _asking(self) -> Iterator[None]:
        with self._turn, qdrant_failures(self._address):
            yield

    def layout(self) -> Layout | None:
        with self._asking():
            if not self._client.collection_exists(self.collection):
                return None
            return _read_layout(self._client.get_collection(self.collection).config.params)

    def resolve(self) -> None:
        with self._asking():
            aliases = self._client.get_aliases().aliases
        named = {alias.alias_name: alias.collection_name for alias in aliases}
        self.collection = named.get(self.collection, self.collection)

    def origin(self) -> Origin | None:
        with self._asking():
            if not self._client.collection_exists(self.collection):
                return None
            config = self._client.get_collection(self.collection).config
        return Origin.of_metadata(config.metadata)

    def note_origin(self, origin: Origin) -> None:
        """Have the collection say where its vectors come from; before Qdrant 1.16 it cannot."""
        with self._asking():
            self._client.update_collection(self.collection, metadata=origin.metadata)

    def create(self, layout: Layout, origin: Origin | None) -> None:
        with self._asking():
            self._client.create_collection(
                self.collection,
                metadata=None if origin is None else origin.metadata,
                vectors_config={name: _params(each) for name, each in layout.vectors.items()},
                sparse_vectors_config={name: q.SparseVectorParams() for name in layout.sparse},
            )
        self._index_payload()

    def _index_payload(self) -> None:
        """For filters by data set and by source; the engine in Python has no such index."""
        for key in (DATASET, SOURCE) if self._is_server else ():
            with self._asking():
                self._client.create_payload_index(self.collection, key, q.PayloadSchemaType.KEYWORD)

    def start_indexing(self) -> None:
        layout = self.layout()
        if layout is None or layout.vectors[DENSE].edges != 0:
            return
        # Again, in case that the run was killed which has made the collection.
        self._index_payload()
        graph = q.HnswConfigDiff(m=DEFAULT_EDGES)
        with self._asking():
            self._client.update_collection(
                self.collection, vectors_config={DENSE: q.VectorParamsDiff(hnsw_config=graph)}
            )

    def existing(self, ids: Sequence[str]) -> set[str]:
        with self._asking():
            found = self._client.retrieve(
                self.collection, ids, with_payload=False, with_vectors=False
            )
        return {str(each.id) for each in found}

    def upsert(self, points: Sequence[Point]) -> None:
        with self._asking():
            if self.transport == _GRPC:
                request = q_grpc.UpsertPoints(
                    collection_name=self.collection,
                    wait=True,
                    points=list(map(to_message, points)),
                )
                self._client.grpc_points.Upsert(request, timeout=self._timeout)
            else:
                self._client.upsert(self.collection, list(map(to_struct, points)), wait=True)

    def delete(self, ids: Sequence[str]) -> None:
        with self._asking():
            selected = q.PointIdsList(points=list(ids))
            self._client.delete(self.collection, selected, wait=True)

    def read(self, ids: Sequence[str], *, with_vectors: bool) -> list[Point]:
        with self._asking():
            return list(
                map(_read_point, self._client.retrieve(self.collection, ids, True, with_vectors))
            )

    def sample(self, count: int) -> list[Point]:
        chance = q.SampleQuery(sample=q.Sample.RANDOM)
        with self._asking():
            answer = self._client.query_points(self.collection, chance, limit=count)
        return list(map(_read_point, answer.points))

    def count(self, dataset: str | None) -> int:
        with self._asking():
            return self._client.count(self.collection, _of_dataset(dataset), exact=True).count

    def page(self, dataset: str | None, offset: Any) -> tuple[list[str], Any]:
        with self._asking():
            found, following = self._client.scroll(
                self.collection,
                _of_dataset(dataset),
                limit=PAGE,
                offset=offset,
                with_payload=False,
                with_vectors=False,
            )
        return [str(each.id) for each in found], following

    def search(self, query: Vectors, depths: Depths) -> dict[str, list[Hit]]:
        requests = to_stages(query, depths)
        with self._asking():
            answers = self._client.query_batch_points(self.collection, list(requests.values()))
        return {
            stage: [Hit(str(each.id), each.score, each.payload or {}) for each in answer.points]
            for stage, answer in zip(requests, answers, strict=True)
        }

    def close(self) -> None:
        if self.owns_connections:
            self._client.close()


def _open_locally(address: str) -> QdrantClient:
    try:
        if address == IN_MEMORY:
            return QdrantClient(IN_MEMORY)
        return QdrantClient(path=address, force_disable_check_same_thread=True)
    except RuntimeError as error:  # Of a folder that another process has open.
        raise QdrantBusyError(f"{address} cannot be opened: {error}") from error


def _read_layout(params: q.CollectionParams) -> Layout:
    vectors = params.vectors or {}
    named = {"": vectors} if isinstance(vectors, q.VectorParams) else vectors
    sparse = params.sparse_vectors or {}
    return Layout(
        {name: _read_space(each) for name, each in named.items()},
        {name: each.modifier and str(each.modifier.value) for name, each in sparse.items()},
    )


def _read_space(params: q.VectorParams) -> VectorConfig:
    return VectorConfig(
        params.size,
        params.distance.value,
        cast("Datatype", params.datatype.value if params.datatype else "float32"),
        params.multivector_config is not None,
        params.hnsw_config.m if params.hnsw_config else None,
    )


def _params(space: VectorConfig) -> q.VectorParams:
    max_sim = q.MultiVectorConfig(comparator=q.MultiVectorComparator.MAX_SIM)
    return q.VectorParams(
        size=space.size,
        distance=q.Distance(space.distance),
        datatype=q.Datatype(space.datatype),
        multivector_config=max_sim if space.is_multivector else None,
        hnsw_config=q.HnswConfigDiff(m=0),
    )


def _read_point(found: q.Record | q.ScoredPoint) -> Point:
    return Point(str(found.id), read_vectors(found.vector), found.payload or {})


def _of_dataset(dataset: str | None) -> q.Filter | None:
    if dataset is None:
        return None
    return q.Filter(must=[q.FieldCondition(key=DATASET, match=q.MatchValue(value=dataset))])
