"""The used calls of Qdrant's gRPC API, with the conversions of its client."""

from concurrent import futures
from typing import Any

import grpc
from qdrant_client import grpc as q_grpc
from qdrant_client import models as q
from qdrant_client.conversions.conversion import GrpcToRest, RestToGrpc

from tests.support.qdrant.engine import QdrantEngine

_STREAMS = 8
_CODES = {
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
}


class Collections(q_grpc.CollectionsServicer):
    """Calls about collections."""

    def __init__(self, engine: QdrantEngine) -> None:
        self._engine = engine

    def CollectionExists(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        exists = self._engine.client.collection_exists(request.collection_name)
        return q_grpc.CollectionExistsResponse(result=q_grpc.CollectionExists(exists=exists))

    def Get(self, request: Any, context: Any) -> Any:  # noqa: N802
        info = self._engine.describe(request.collection_name)
        return q_grpc.GetCollectionInfoResponse(result=RestToGrpc.convert_collection_info(info))

    def Create(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._engine.client.create_collection(
            request.collection_name,
            vectors_config=GrpcToRest.convert_vectors_config(request.vectors_config),
            sparse_vectors_config=GrpcToRest.convert_sparse_vector_config(
                request.sparse_vectors_config
            ),
            metadata=GrpcToRest.convert_payload(request.metadata) or None,
        )
        return q_grpc.CollectionOperationResponse(result=True)

    def Update(self, request: Any, context: Any) -> Any:  # noqa: N802
        changed = request.vectors_config.params_map.map
        graphs = {name: change.hnsw_config.m for name, change in changed.items()}
        metadata = GrpcToRest.convert_payload(request.metadata) or None
        self._engine.update(request.collection_name, graphs, metadata)
        return q_grpc.CollectionOperationResponse(result=True)

    def ListAliases(self, request: Any, context: Any) -> Any:  # noqa: N802
        found = self._engine.client.get_aliases().aliases
        return q_grpc.ListAliasesResponse(
            aliases=[RestToGrpc.convert_alias_description(alias) for alias in found]
        )


class Points(q_grpc.PointsServicer):
    """Calls about points."""

    def __init__(self, engine: QdrantEngine) -> None:
        self._engine = engine
        self._client = engine.client

    def CreateFieldIndex(self, request: Any, context: Any) -> Any:  # noqa: N802
        return _done()

    def Upsert(self, request: Any, context: Any) -> Any:  # noqa: N802
        points = [GrpcToRest.convert_point_struct(point) for point in request.points]
        name = request.collection_name
        with self._engine.upload(name, points, request.ByteSize()) as fault:
            if fault is not None and fault.status != 200:
                context.abort(_CODES[fault.status], fault.reason)
            self._engine.store(name, points)
        return _done()

    def Get(self, request: Any, context: Any) -> Any:  # noqa: N802
        ids = [GrpcToRest.convert_point_id(point_id) for point_id in request.ids]
        included = (request.with_payload.enable, request.with_vectors.enable)
        with self._engine.lock:
            found = self._client.retrieve(request.collection_name, ids, *included)
        return q_grpc.GetResponse(result=list(map(_retrieved, found)))

    def Delete(self, request: Any, context: Any) -> Any:  # noqa: N802
        ids = [GrpcToRest.convert_point_id(point_id) for point_id in request.points.points.ids]
        with self._engine.lock:
            self._client.delete(request.collection_name, ids)
        return _done()

    def Scroll(self, request: Any, context: Any) -> Any:  # noqa: N802
        offset = GrpcToRest.convert_point_id(request.offset) if request.HasField("offset") else None
        with self._engine.lock:
            found, following = self._client.scroll(
                request.collection_name,
                GrpcToRest.convert_filter(request.filter),
                request.limit,
                offset=offset,
            )
        points = list(map(_retrieved, found))
        after = None if following is None else RestToGrpc.convert_extended_point_id(following)
        return q_grpc.ScrollResponse(result=points, next_page_offset=after)

    def Count(self, request: Any, context: Any) -> Any:  # noqa: N802
        condition = GrpcToRest.convert_filter(request.filter)
        with self._engine.lock:
            count = self._client.count(request.collection_name, condition).count
        return q_grpc.CountResponse(result=q_grpc.CountResult(count=count))

    def QueryBatch(self, request: Any, context: Any) -> Any:  # noqa: N802
        queries = [GrpcToRest.convert_query_points(query) for query in request.query_points]
        with self._engine.lock:
            responses = self._client.query_batch_points(request.collection_name, queries)
        return q_grpc.QueryBatchResponse(
            result=[
                q_grpc.BatchResult(
                    result=[RestToGrpc.convert_scored_point(hit) for hit in response.points]
                )
                for response in responses
            ]
        )


def _retrieved(record: q.Record) -> Any:
    return RestToGrpc.convert_record(record.model_copy(update={"payload": record.payload or {}}))


def _done() -> Any:
    status = q_grpc.UpdateStatus.Completed
    return q_grpc.PointsOperationResponse(
        result=q_grpc.UpdateResult(operation_id=0, status=status), time=0.0
    )


def start_grpc(engine: QdrantEngine) -> tuple[grpc.Server, int]:
    """Start a server on a free loopback port; as in Qdrant, messages may have any size."""
    server = grpc.server(
        futures.ThreadPoolExecutor(_STREAMS), options=[("grpc.max_receive_message_length", -1)]
    )
    q_grpc.add_CollectionsServicer_to_server(Collections(engine), server)
    q_grpc.add_PointsServicer_to_server(Points(engine), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, port
