"""A collection on a Qdrant server, over gRPC or HTTP."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

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
    TextVectors,
    VectorConfig,
    is_disk_full,
    named_vectors,
    read_vectors,
    to_lists,
)

_REFUSED = {400, 413, 422}
_BUSY = {408, 429, 500, 502, 503, 504}
_INSUFFICIENT_STORAGE = 507
_MAX_REASON = 300

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
_GRPC = "gRPC"
_GRPC_PROBE_SECONDS = 5
# A float32 takes up to 22 characters of JSON, and 4 bytes of gRPC.
_JSON_BYTES, _GRPC_BYTES = 22, 4


@contextmanager
def _failures(address: str) -> Iterator[None]:
    """Raise the exceptions of Qdrant's client as `QdrantError`."""
    try:
        yield
    except UnexpectedResponse as error:
        raise _http_error(address, error.status_code or 0, _read_reason(error)) from error
    except ResourceExhaustedResponse as error:
        detail = f"Qdrant at {address} has no room for more requests: {error}"
        raise QdrantBusyError(detail, error.retry_after_s) from error
    except ResponseHandlingException as error:
        raise _connection_error(address, error.source) from error
    except grpc.RpcError as error:
        raise _grpc_error(address, error.code(), str(error.details())) from error


def _http_error(address: str, status: int, reason: str) -> QdrantError:
    sentence = f"Qdrant at {address} answers {status}: {reason}"
    if status == _INSUFFICIENT_STORAGE or is_disk_full(reason):
        return QdrantFullError(sentence)
    if status in _REFUSED:
        return QdrantRefusedError(sentence)
    return QdrantBusyError(sentence) if status in _BUSY else QdrantError(sentence)


def _grpc_error(address: str, code: grpc.StatusCode, reason: str) -> QdrantError:
    sentence = f"Qdrant at {address} answers {code.name}: {reason[:_MAX_REASON]}"
    if is_disk_full(reason):
        return QdrantFullError(sentence)
    if code in _GRPC_REFUSED or "message larger" in reason:
        return QdrantRefusedError(sentence)
    return QdrantBusyError(sentence) if code in _GRPC_BUSY else QdrantError(sentence)


def _connection_error(address: str, source: Exception) -> QdrantError:
    if isinstance(source, httpx.TimeoutException):
        return QdrantBusyError(f"Qdrant at {address} did not answer in time")
    if isinstance(source, httpx.TransportError):
        return QdrantBusyError(f"no connection to Qdrant at {address}: {source}")
    return QdrantError(f"the server at {address} is not Qdrant: {source}")


def _read_reason(error: UnexpectedResponse) -> str:
    """Return the error message of Qdrant, or the beginning of a response from another server."""
    try:
        return str(error.structured()["status"]["error"])
    except (ValueError, KeyError, TypeError):
        return error.content.decode(errors="replace")[:_MAX_REASON] or error.reason_phrase


def _to_struct(point: Point) -> q.PointStruct:
    """Convert a point for HTTP."""
    payload = cast("dict[str, Any]", point.payload)
    return q.PointStruct(id=point.id, vector=_named(point.vectors), payload=payload)


def _to_message(point: Point) -> q_grpc.PointStruct:
    """Convert a point for gRPC, in a quarter of the time and memory that Qdrant's client takes."""
    vectors = point.vectors
    named: dict[str, q_grpc.Vector] = {}
    if vectors.dense is not None:
        named[DENSE] = q_grpc.Vector(dense=q_grpc.DenseVector(data=to_lists(vectors.dense)))
    if vectors.sparse is not None:
        indices, values = vectors.sparse.indices.tolist(), vectors.sparse.values.tolist()
        sparse = q_grpc.SparseVector(indices=indices, values=values)
        named[SPARSE] = q_grpc.Vector(sparse=sparse)
    if vectors.colbert is not None:
        rows = [q_grpc.DenseVector(data=to_lists(row)) for row in vectors.colbert]
        named[COLBERT] = q_grpc.Vector(multi_dense=q_grpc.MultiDenseVector(vectors=rows))
    return q_grpc.PointStruct(
        id=q_grpc.PointId(uuid=point.id),
        vectors=q_grpc.Vectors(vectors=q_grpc.NamedVectors(vectors=named)),
        payload=RestToGrpc.convert_payload(cast("dict[str, Any]", point.payload)),
    )


def _named(vectors: TextVectors) -> dict[str, Any]:
    return named_vectors(vectors, lambda ids, values: q.SparseVector(indices=ids, values=values))


def _to_stages(query: TextVectors, depths: Depths) -> dict[str, q.QueryRequest]:
    """Return a request for each stage; it includes all earlier stages, computed again."""
    named = _named(query)
    colbert = named.pop(COLBERT, None)
    first = {
        name: q.Prefetch(query=vector, using=name, limit=depths.candidates)
        for name, vector in named.items()
    }
    weights = [RRF_WEIGHTS[name] for name in first]
    rrf = q.RrfQuery(rrf=q.Rrf(k=RRF_CONSTANT, weights=weights))
    requests = {
        name: q.QueryRequest(query=prefetch.query, using=name, limit=prefetch.limit)
        for name, prefetch in first.items()
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


class ServerStore:
    """A collection on a Qdrant server."""

    def __init__(self, target: Target) -> None:
        self._address = target.address
        self.collection = target.collection
        self._timeout = target.timeout
        self._client, self.transport = self._connect(target)
        self.bytes_per_number = _GRPC_BYTES if self.transport == _GRPC else _JSON_BYTES

    def _connect(self, target: Target) -> tuple[QdrantClient, str]:
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

    def _answers_grpc(self, client: QdrantClient) -> bool:
        request = q_grpc.CollectionExistsRequest(collection_name=self.collection)
        try:
            with self._requesting():
                client.grpc_collections.CollectionExists(request, timeout=_GRPC_PROBE_SECONDS)
        except QdrantError:
            return False
        return True

    def _requesting(self) -> AbstractContextManager[None]:
        return _failures(self._address)

    def _configuration(self) -> q.CollectionConfig | None:
        with self._requesting():
            if not self._client.collection_exists(self.collection):
                return None
            return self._client.get_collection(self.collection).config

    def layout(self) -> Layout | None:
        found = self._configuration()
        return None if found is None else Layout.of_parameters(found.params.model_dump(mode="json"))

    def resolve_alias(self) -> None:
        with self._requesting():
            aliases = self._client.get_aliases().aliases
        named = {alias.alias_name: alias.collection_name for alias in aliases}
        self.collection = named.get(self.collection, self.collection)

    def origin(self) -> Origin | None:
        found = self._configuration()
        return None if found is None else Origin.of_metadata(found.metadata)

    def set_origin(self, origin: Origin) -> None:
        """Store the origin in the collection's metadata, which Qdrant has since 1.16."""
        with self._requesting():
            self._client.update_collection(self.collection, metadata=origin.metadata)

    def create(self, layout: Layout, origin: Origin) -> None:
        with self._requesting():
            self._client.create_collection(
                self.collection,
                metadata=origin.metadata,
                vectors_config={
                    name: _to_params(config) for name, config in layout.vectors.items()
                },
                sparse_vectors_config={name: q.SparseVectorParams() for name in layout.sparse},
            )
        self._index_payload()

    def _index_payload(self) -> None:
        """Index data set and source for filters."""
        for key in (DATASET, SOURCE):
            with self._requesting():
                self._client.create_payload_index(self.collection, key, q.PayloadSchemaType.KEYWORD)

    def start_indexing(self) -> None:
        found = self._configuration()
        if found is None:
            return
        graph = cast("dict[str, q.VectorParams]", found.params.vectors)[DENSE].hnsw_config
        if graph is None or graph.m != 0:
            return
        # The run that created the collection may have been killed before this.
        self._index_payload()
        graph = q.HnswConfigDiff(m=DEFAULT_EDGES)
        with self._requesting():
            self._client.update_collection(
                self.collection, vectors_config={DENSE: q.VectorParamsDiff(hnsw_config=graph)}
            )

    def existing(self, ids: Sequence[str]) -> set[str]:
        with self._requesting():
            found = self._client.retrieve(
                self.collection, ids, with_payload=False, with_vectors=False
            )
        return {str(record.id) for record in found}

    def upsert(self, points: Sequence[Point]) -> None:
        with self._requesting():
            if self.transport == _GRPC:
                request = q_grpc.UpsertPoints(
                    collection_name=self.collection,
                    wait=True,
                    points=list(map(_to_message, points)),
                )
                self._client.grpc_points.Upsert(request, timeout=self._timeout)
            else:
                self._client.upsert(self.collection, list(map(_to_struct, points)), wait=True)

    def delete(self, ids: Sequence[str]) -> None:
        with self._requesting():
            selected = q.PointIdsList(points=list(ids))
            self._client.delete(self.collection, selected, wait=True)

    def read(self, ids: Sequence[str], *, with_vectors: bool) -> list[Point]:
        with self._requesting():
            found = self._client.retrieve(self.collection, ids, True, with_vectors)
        return [
            Point(str(record.id), read_vectors(record.vector), record.payload or {})
            for record in found
        ]

    def count(self, dataset: str | None) -> int:
        with self._requesting():
            return self._client.count(self.collection, _dataset_filter(dataset), exact=True).count

    def page(self, dataset: str | None, offset: Any) -> tuple[list[str], Any]:
        with self._requesting():
            found, following = self._client.scroll(
                self.collection,
                _dataset_filter(dataset),
                limit=PAGE,
                offset=offset,
                with_payload=False,
                with_vectors=False,
            )
        return [str(record.id) for record in found], following

    def search(self, query: TextVectors, depths: Depths) -> dict[str, list[Hit]]:
        requests = _to_stages(query, depths)
        with self._requesting():
            answers = self._client.query_batch_points(self.collection, list(requests.values()))
        return {
            stage: [Hit(str(point.id), point.score, point.payload or {}) for point in answer.points]
            for stage, answer in zip(requests, answers, strict=True)
        }

    def close(self) -> None:
        self._client.close()


def _to_params(config: VectorConfig) -> q.VectorParams:
    max_sim = q.MultiVectorConfig(comparator=q.MultiVectorComparator.MAX_SIM)
    return q.VectorParams(
        size=config.size,
        distance=q.Distance(config.distance),
        datatype=q.Datatype(config.datatype),
        multivector_config=max_sim if config.is_multivector else None,
        hnsw_config=q.HnswConfigDiff(m=0),  # `start_indexing` builds the graph after the load.
    )


def _dataset_filter(dataset: str | None) -> q.Filter | None:
    if dataset is None:
        return None
    return q.Filter(must=[q.FieldCondition(key=DATASET, match=q.MatchValue(value=dataset))])
