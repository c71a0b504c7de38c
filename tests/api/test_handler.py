"""The shared path of a request: any schema, any rendering."""

from typing import ClassVar

import orjson
import pytest
from fastapi import FastAPI, Request
from httpx2 import ASGITransport, AsyncClient
from starlette import datastructures

from app.api.errors import install_error_handlers
from app.api.handler import Call, Operation, ServiceDep, respond
from app.api.paths import NATIVE_EMBEDDINGS, Dialect
from app.api.schemas import RequestModel
from app.main import create_app
from app.middleware.context import ProvideContext
from app.settings import Settings


class Shout(RequestModel):
    """A request of another API."""

    example: ClassVar = {"input": ["a"]}
    aliases: ClassVar = {"sentences": "input"}
    input: list[str]


async def shout(body: Shout, call: Call):
    return await call.render(lambda: [orjson.dumps([text.upper() for text in body.input])], 0)


SHOUT = Operation(Dialect.NATIVE, NATIVE_EMBEDDINGS, "input", Shout, shout)


@pytest.fixture
def client():
    """An app with one endpoint of another shape, beside the real service's parts."""
    app = FastAPI()
    app.state.service = create_app(Settings(api_token=None)).state.service

    @app.post("/shout")
    async def endpoint(request: Request, service: ServiceDep):
        return await respond(request, service, SHOUT)

    install_error_handlers(app)
    app.add_middleware(ProvideContext, trusted_proxies=())
    return AsyncClient(transport=ASGITransport(app), base_url="http://service")


async def test_an_endpoint_of_another_shape_takes_the_same_path(client) -> None:
    async with client:
        answer = await client.post("/shout", json={"input": ["a", "b"]})
    assert answer.json() == ["A", "B"]
    assert answer.headers["x-request-id"]


async def test_its_errors_have_the_same_shape_and_its_own_example(client) -> None:
    async with client:
        answer = await client.post("/shout", json={"sentences": ["a"]})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    assert answer.json()["detail"] == (
        'The field input is missing, and sentences is none: call it input, as in {"input":["a"]}.'
    )


async def test_no_endpoint_parses_a_query_that_it_does_not_read(monkeypatch) -> None:
    """FastAPI would, for every one, and take 20 ms for 64 KiB of them."""
    parsed = []
    monkeypatch.setattr(datastructures, "parse_qsl", lambda *args, **_: parsed.append(args) or [])
    transport = ASGITransport(create_app(Settings(api_token=None)))
    async with AsyncClient(transport=transport, base_url="http://service") as client:
        for path in ("/", "/health", "/v1/models", "/nowhere"):
            await client.get(f"{path}?{'a&' * 30_000}")
        answer = await client.post(
            f"/embeddings/stream?{'a=b&' * 15_000}", headers={"Content-Type": "application/jsonl"}
        )
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    assert "more than 100 options" in answer.json()["detail"]
    assert max((len(query) for query, *_ in parsed), default=0) == 0
