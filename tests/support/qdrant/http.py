"""The used endpoints of Qdrant's HTTP API, with the models of its client."""

import json
import time
from collections.abc import Callable
from typing import Any

from pydantic_core import to_jsonable_python
from qdrant_client import models as q
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.support.qdrant.engine import Fault, QdrantEngine, RefusedError

# The default of Qdrant's `service.max_request_size_mb`.
MOST_BODY_BYTES = 32 * 2**20
_DONE = {"operation_id": 0, "status": "completed"}
# Called with the name of a collection and the body; returns the result.
Endpoint = Callable[[str, bytes], Any]


def result(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> JSONResponse:
    if status == 200:
        plain = to_jsonable_python(value, exclude_none=True)
        return JSONResponse({"result": plain, "status": "ok", "time": 0.0})
    return JSONResponse({"status": {"error": value}, "time": 0.0}, status, headers)


class QdrantHttp:
    """The endpoints of one engine."""

    def __init__(self, engine: QdrantEngine) -> None:
        self.engine = engine
        self.client = engine.client

    def app(self) -> Starlette:
        client, path = self.client, "/collections/{name}"
        locked: dict[tuple[str, str], Endpoint] = {
            ("GET", f"{path}/exists"): lambda name, _: {"exists": client.collection_exists(name)},
            ("GET", path): lambda name, _: self.engine.describe(name),
            ("PUT", path): self.create,
            ("PATCH", path): self.update,
            ("GET", "/aliases"): lambda *_: client.get_aliases(),
            ("POST", "/collections/aliases"): self.change_aliases,
            ("PUT", f"{path}/index"): lambda *_: _DONE,
            ("POST", f"{path}/points"): self.retrieve,
            ("POST", f"{path}/points/delete"): self.delete,
            ("POST", f"{path}/points/scroll"): self.scroll,
            ("POST", f"{path}/points/count"): self.count,
            ("POST", f"{path}/points/query/batch"): self.query,
            ("POST", "/test/fault"): self.set_fault,
            ("GET", "/test/{name}"): lambda name, _: vars(self.engine.collections[name]),
        }
        endpoints = {key: self._lock(endpoint) for key, endpoint in locked.items()}
        endpoints["PUT", f"{path}/points"] = self.upsert
        return Starlette(
            routes=[
                Route(path, self._run_in_thread(endpoint), methods=[method])
                for (method, path), endpoint in endpoints.items()
            ]
        )

    def _lock(self, endpoint: Endpoint) -> Endpoint:
        def locked(name: str, body: bytes) -> JSONResponse:
            with self.engine.lock:
                return result(endpoint(name, body))

        return locked

    def _run_in_thread(self, endpoint: Endpoint) -> Any:
        async def handle(request: Request) -> JSONResponse:
            name = request.path_params.get("name", "")
            collection, is_change = self.engine.collections[name], request.method == "PUT"
            collection.requests += is_change
            try:
                body = await request.body()
                if len(body) > MOST_BODY_BYTES:
                    return result("Payload Too Large", 413)
                return await run_in_threadpool(endpoint, name, body)
            finally:
                collection.requests -= is_change

        return handle

    def create(self, name: str, body: bytes) -> bool:
        request = q.CreateCollection.model_validate_json(body)
        return self.client.create_collection(
            name,
            vectors_config=request.vectors,
            sparse_vectors_config=request.sparse_vectors,
            metadata=request.metadata,
        )

    def update(self, name: str, body: bytes) -> bool:
        """Change the graph of a vector, or metadata."""
        request = q.UpdateCollection.model_validate_json(body)
        graphs = {vector: diff.hnsw_config.m for vector, diff in (request.vectors or {}).items()}
        return self.engine.update(name, graphs, request.metadata)

    def change_aliases(self, _: str, body: bytes) -> bool:
        request = q.ChangeAliasesOperation.model_validate_json(body)
        return self.client.update_collection_aliases(request.actions)

    def upsert(self, name: str, body: bytes) -> JSONResponse:
        points = q.PointsList.model_validate_json(body).points
        with self.engine.upload(name, points, len(body)) as fault:
            try:
                if fault is not None:
                    if fault.after:
                        self.engine.store(name, points)
                    time.sleep(fault.seconds)
                    if fault.status != 200:
                        return result(fault.reason, fault.status, fault.headers)
                self.engine.store(name, points)
            except RefusedError as error:
                return result(str(error), 422)
        return result(_DONE)

    def retrieve(self, name: str, body: bytes) -> Any:
        request = q.PointRequest.model_validate_json(body)
        return self.client.retrieve(name, request.ids, request.with_payload, request.with_vector)

    def delete(self, name: str, body: bytes) -> Any:
        self.client.delete(name, q.PointIdsList.model_validate_json(body))
        return _DONE

    def scroll(self, name: str, body: bytes) -> Any:
        request = q.ScrollRequest.model_validate_json(body)
        found, offset = self.client.scroll(
            name,
            request.filter,
            request.limit or 10,
            offset=request.offset,
            with_vectors=bool(request.with_vector),
        )
        return {"points": found, "next_page_offset": offset}

    def count(self, name: str, body: bytes) -> Any:
        return self.client.count(name, q.CountRequest.model_validate_json(body).filter)

    def query(self, name: str, body: bytes) -> Any:
        request = q.QueryRequestBatch.model_validate_json(body)
        return self.client.query_batch_points(name, request.searches)

    def set_fault(self, _: str, body: bytes) -> bool:
        self.engine.fault = Fault(**json.loads(body))
        return True
