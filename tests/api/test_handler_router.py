"""A dialect of one file: its router brings its paths, tag, shape of errors, and what it shares."""

from typing import Annotated, Any, ClassVar

from fastapi import Request
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response

from smart_embedder import main
from smart_embedder.api.context import NATIVE_EMBEDDINGS, Dialect, Endpoint, ErrorFacts
from smart_embedder.api.handler import Call, Operation, Router, ServiceDep, respond
from smart_embedder.api.openapi import BEARER, describe_work
from smart_embedder.api.schemas import ForeignRequest
from smart_embedder.api.work import embed, embedder_of
from smart_embedder.engine.records import Outputs
from tests.engine.fakes import FakeModel, loaded
from tests.support.in_process import served


class OllamaRequest(ForeignRequest):
    """Texts to embed."""

    example: ClassVar = {"ollama_input": ["a"]}

    ollama_input: list[str]
    size: Annotated[int, Field(ge=1)] = 1


class OllamaAnswer(BaseModel):
    """Vectors."""

    embeddings: list[list[float]]


def error_body(error: ErrorFacts, _request_id: str) -> dict[str, Any]:
    return {"oops": error.message}


OLLAMA = Dialect("Ollama", error_body, {"unauthorized": 418, "invalid_request": 400})
ENDPOINT = Endpoint("/ollama/embed")
router = Router(
    OLLAMA, [{"name": "Ollama"}], below=("/ollama/",), tags=["Ollama"], dependencies=[BEARER]
)


@router.work(ENDPOINT.path, ENDPOINT, **describe_work("Embed texts", OllamaRequest, OllamaAnswer))
async def ollama(request: Request, service: ServiceDep) -> Response:
    return await respond(request, service, OPERATION)


@router.health_check("/ollama/up", summary="Is it up?")
async def up() -> Response:
    return Response()


async def answer(body: OllamaRequest, call: Call) -> Response:
    outputs = Outputs(dense=True)
    result = await embed(
        call, body.ollama_input, outputs, field="ollama_input", model=embedder_of(call)
    )
    return JSONResponse({"embeddings": [each.dense.tolist() for each in result.embeddings]})


OPERATION = Operation(OLLAMA, ENDPOINT, "ollama_input", OllamaRequest, answer)
router.share(OPERATION, NATIVE_EMBEDDINGS.path)


async def test_a_new_dialect_needs_only_its_place_in_the_list_of_routers(monkeypatch) -> None:
    monkeypatch.setattr(main, "ROUTERS", (*main.ROUTERS, router))
    good = {"ollama_input": ["a", "b"]}
    async with served(loaded(FakeModel()), api_token="secret") as (service, client):
        token = {"Authorization": "Bearer secret"}
        for path in (ENDPOINT.path, "/embeddings"):
            answered = await client.post(path, json=good, headers=token)
            assert len(answered.json()["embeddings"]) == 2, path
            wrong = await client.post(path, json=good | {"size": 0}, headers=token)
            assert (wrong.status_code, list(wrong.json())) == (400, ["oops"]), path
        refused = await client.post(ENDPOINT.path, json=good)
        assert (refused.status_code, list(refused.json())) == (418, ["oops"])
        assert (await client.get("/ollama/up")).status_code == 200
        nowhere = await client.get("/ollama/nowhere", headers=token)
        assert (nowhere.status_code, list(nowhere.json())) == (404, ["oops"])
        neither = await client.post("/embeddings", json={}, headers=token)
        assert "ollama_input (Ollama)" in neither.json()["detail"]
        assert (neither.status_code, "oops" in neither.json()) == (422, True)
        metrics = service.metrics.value
        # The shared path's requests count there once the body has told its dialect.
        labels = {"status": "success", "endpoint": ENDPOINT.path}
        assert metrics("embedding_requests_total", **labels) == 2
        description = (await client.get("/openapi.json")).json()
    assert {"name": "Ollama"} in description["tags"]
    assert description["paths"][ENDPOINT.path]["post"]["tags"] == ["Ollama"]
