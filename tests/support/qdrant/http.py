"""Qdrant's HTTP API: the endpoints that are used, by its own models."""

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

from tests.support.qdrant.engine import Engine, Fault, RefusedError

# Qdrant's own default, `service.max_request_size_mb`.
MOST_BODY_BYTES = 32 * 2**20
_DONE = {"operation_id": 0, "status": "completed"}
# Of a collection's name and a body.
Answer = Callable[[str, bytes], Any]


def result(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> JSONResponse:
    if status == 200:
        plain = to_jsonable_python(value, exclude_none=True)
        return JSONResponse({"result": plain, "status": "ok", "time": 0.0})
    return JSONResponse({"status": {"error": value}, "time": 0.0}, status, headers)


class HTTP:
    """The endpoints of one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.client = engine.client

    def app(self) -> Starlette:
        client, one = self.client, "/collections/{name}"
        at_once: dict[tuple[str, str], Answer] = {
            ("GET", f"{one}/exists"): lambda name, _: {"exists": client.collection_exists(name)},
            ("GET", one): lambda name, _: self.engine.describe(name),
            ("PUT", one): self.create,
            ("PATCH", one): self.update,
            ("GET", "/aliases"): lambda *_: client.get_aliases(),
            ("POST", "/collections/aliases"): self.change_aliases,
            ("PUT", f"{one}/index"): lambda *_: _DONE,
            ("POST", f"{one}/points"): self.retrieve,
            ("POST", f"{one}/points/delete"): self.delete,
            ("POST", f"{one}/points/scroll"): self.scroll,
            ("POST", f"{one}/points/count"): self.count,
            ("POST", f"{one}/points/query"): self.query_once,
            ("POST", f"{one}/points/query/batch"): self.query,
            ("POST", "/told/fault"): self.fault,
            ("GET", "/told/{name}"): lambda name, _: vars(self.engine.collections[name]),
        }
        answers = {key: self._locked(answer) for key, answer in at_once.items()}
        answers["PUT", f"{one}/points"] = self.upsert
        return Starlette(
            routes=[
                Route(path, self._in_thread(answer), methods=[method])
                for (method, path), answer in answers.items()
            ]
        )

    def _locked(self, answer: Answer) -> Answer:
        def locked(name: str, body: bytes) -> JSONResponse:
            with self.engine.turn:
                return result(answer(name, body))

        return locked

    def _in_thread(self, answer: Answer) -> Any:
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

    def create(self, name: str, body: bytes) -> bool:
        asked = q.CreateCollection.model_validate_json(body)
        return self.client.create_collection(
            name,
            vectors_config=asked.vectors,
            sparse_vectors_config=asked.sparse_vectors,
            metadata=asked.metadata,
        )

    def update(self, name: str, body: bytes) -> bool:
        """Change the graph of a vector, or metadata."""
        asked = q.UpdateCollection.model_validate_json(body)
        graphs = {vector: diff.hnsw_config.m for vector, diff in (asked.vectors or {}).items()}
        return self.engine.update(name, graphs, asked.metadata)

    def change_aliases(self, _: str, body: bytes) -> bool:
        asked = q.ChangeAliasesOperation.model_validate_json(body)
        return self.client.update_collection_aliases(asked.actions)

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
        asked = q.PointRequest.model_validate_json(body)
        return self.client.retrieve(name, asked.ids, asked.with_payload, asked.with_vector)

    def delete(self, name: str, body: bytes) -> Any:
        self.client.delete(name, q.PointIdsList.model_validate_json(body))
        return _DONE

    def scroll(self, name: str, body: bytes) -> Any:
        asked = q.ScrollRequest.model_validate_json(body)
        found, offset = self.client.scroll(
            name, asked.filter, asked.limit or 10, offset=asked.offset
        )
        return {"points": found, "next_page_offset": offset}

    def count(self, name: str, body: bytes) -> Any:
        return self.client.count(name, q.CountRequest.model_validate_json(body).filter)

    def query(self, name: str, body: bytes) -> Any:
        asked = q.QueryRequestBatch.model_validate_json(body)
        return self.client.query_batch_points(name, asked.searches)

    def query_once(self, name: str, body: bytes) -> Any:
        (answer,) = self.client.query_batch_points(name, [q.QueryRequest.model_validate_json(body)])
        return answer

    def fault(self, _: str, body: bytes) -> bool:
        self.engine.fault = Fault(**json.loads(body))
        return True
