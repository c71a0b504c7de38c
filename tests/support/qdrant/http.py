"""Qdrant's HTTP API: the endpoints that are used, by its own models."""

import json
import time
from typing import Any

from qdrant_client import models as q
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.support.qdrant.engine import Engine, Fault, RefusedError

# Qdrant's own default, `service.max_request_size_mb`.
MOST_BODY_BYTES = 32 * 2**20


def result(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> JSONResponse:
    if status == 200:
        return JSONResponse({"result": value, "status": "ok", "time": 0.0})
    return JSONResponse({"status": {"error": value}, "time": 0.0}, status, headers)


def dumped(models: Any) -> Any:
    return [each.model_dump(mode="json", exclude_none=True) for each in models]


class HTTP:
    """The endpoints that are used, by Qdrant's own models."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.client = engine.client

    def app(self) -> Starlette:
        one = "/collections/{name}"
        made = {
            ("GET", f"{one}/exists"): self.exists,
            ("GET", one): self.describe,
            ("PUT", one): self.create,
            ("PATCH", one): self.update,
            ("DELETE", one): self.drop,
            ("GET", "/collections"): self.names,
            ("GET", "/aliases"): self.aliases,
            ("POST", "/collections/aliases"): self.change_aliases,
            ("POST", f"{one}/points/query"): self.query_once,
            ("PUT", f"{one}/index"): self.index,
            ("PUT", f"{one}/points"): self.upsert,
            ("POST", f"{one}/points"): self.retrieve,
            ("POST", f"{one}/points/delete"): self.delete,
            ("POST", f"{one}/points/scroll"): self.scroll,
            ("POST", f"{one}/points/count"): self.count,
            ("POST", f"{one}/points/query/batch"): self.query,
            ("POST", "/told/fault"): self.fault,
            ("GET", "/told/{name}"): self.state,
        }
        return Starlette(
            routes=[
                Route(path, self._in_thread(answer), methods=[method])
                for (method, path), answer in made.items()
            ]
        )

    def _in_thread(self, answer: Any) -> Any:
        async def endpoint(request: Request) -> JSONResponse:
            name = request.path_params.get("name", "")
            collection, is_change = self.engine.collections[name], request.method == "PUT"
            collection.requests += is_change
            try:
                body = await request.body()
                if len(body) > MOST_BODY_BYTES:
                    return result("Payload Too Large", 413)
                return await run_in_threadpool(answer, name, body)
            finally:
                collection.requests -= is_change

        return endpoint

    def exists(self, name: str, _: bytes) -> JSONResponse:
        return result({"exists": self.client.collection_exists(name)})

    def describe(self, name: str, _: bytes) -> JSONResponse:
        return result(self.engine.describe(name).model_dump(mode="json", exclude_none=True))

    def create(self, name: str, body: bytes) -> JSONResponse:
        asked = q.CreateCollection.model_validate_json(body)
        self.client.create_collection(
            name,
            vectors_config=asked.vectors,
            sparse_vectors_config=asked.sparse_vectors,
            metadata=asked.metadata,
        )
        return result(True)

    def update(self, name: str, body: bytes) -> JSONResponse:
        """Change the graph of a vector, or metadata."""
        asked = q.UpdateCollection.model_validate_json(body)
        with self.engine.turn:
            self.client.update_collection(name, metadata=asked.metadata)
        self.engine.collections[name].graphs.update(
            {vector: diff.hnsw_config.m for vector, diff in (asked.vectors or {}).items()}
        )
        return result(True)

    def drop(self, name: str, _: bytes) -> JSONResponse:
        with self.engine.turn:
            return result(self.client.delete_collection(name))

    def names(self, _: str, __: bytes) -> JSONResponse:
        return result(self.client.get_collections().model_dump(mode="json"))

    def aliases(self, _: str, __: bytes) -> JSONResponse:
        return result(self.client.get_aliases().model_dump(mode="json"))

    def change_aliases(self, _: str, body: bytes) -> JSONResponse:
        asked = q.ChangeAliasesOperation.model_validate_json(body)
        with self.engine.turn:
            return result(self.client.update_collection_aliases(asked.actions))

    def index(self, _: str, __: bytes) -> JSONResponse:
        return result({"operation_id": 0, "status": "completed"})

    def upsert(self, name: str, body: bytes) -> JSONResponse:
        points = q.PointsList.model_validate_json(body).points
        with self.engine.upload(name, points, len(body)) as fault:
            try:
                return self._store(name, points, fault)
            except RefusedError as error:
                return result(str(error), 422)

    def _store(self, name: str, points: list[q.PointStruct], fault: Fault | None) -> JSONResponse:
        if fault is not None:
            if fault.after:
                self.engine.store(name, points)
            time.sleep(fault.seconds)
            if fault.status != 200:
                return result(fault.reason, fault.status, fault.headers)
        self.engine.store(name, points)
        return result({"operation_id": 0, "status": "completed"})

    def retrieve(self, name: str, body: bytes) -> JSONResponse:
        asked = q.PointRequest.model_validate_json(body)
        with self.engine.turn:
            found = self.client.retrieve(name, asked.ids, asked.with_payload, asked.with_vector)
        return result(dumped(found))

    def delete(self, name: str, body: bytes) -> JSONResponse:
        with self.engine.turn:
            self.client.delete(name, q.PointIdsList.model_validate_json(body))
        return result({"operation_id": 0, "status": "completed"})

    def scroll(self, name: str, body: bytes) -> JSONResponse:
        asked = q.ScrollRequest.model_validate_json(body)
        with self.engine.turn:
            found, offset = self.client.scroll(
                name, asked.filter, asked.limit or 10, offset=asked.offset
            )
        return result({"points": dumped(found), "next_page_offset": offset})

    def count(self, name: str, body: bytes) -> JSONResponse:
        asked = q.CountRequest.model_validate_json(body)
        with self.engine.turn:
            return result({"count": self.client.count(name, asked.filter).count})

    def query(self, name: str, body: bytes) -> JSONResponse:
        asked = q.QueryRequestBatch.model_validate_json(body)
        with self.engine.turn:
            answers = self.client.query_batch_points(name, asked.searches)
        return result(dumped(answers))

    def query_once(self, name: str, body: bytes) -> JSONResponse:
        asked = q.QueryRequest.model_validate_json(body)
        with self.engine.turn:
            (answer,) = self.client.query_batch_points(name, [asked])
        return result(answer.model_dump(mode="json", exclude_none=True))

    def fault(self, _: str, body: bytes) -> JSONResponse:
        self.engine.fault = Fault(**json.loads(body))
        return result(True)

    def state(self, name: str, _: bytes) -> JSONResponse:
        return result(vars(self.engine.collections[name]))
