"""The part of a request that all endpoints share."""

import asyncio
import threading
from contextlib import AsyncExitStack

import pytest
from fastapi import Request
from httpx2 import ASGITransport, AsyncClient
from starlette import datastructures, requests

from app.context import RequestContext
from app.errors import ClientGoneError
from app.handler import (
    LARGE_ANSWER_BYTES,
    Call,
    cancel_on_disconnect,
    time_limit,
)
from app.headers import is_bulk
from app.main import create_app
from app.settings import Settings
from smart_embedder.errors import InferenceTimeoutError, StartupError, UnavailableError
from smart_embedder.interface import LoadedModels
from smart_embedder.requests import RerankRequest
from smart_embedder.results import RerankResult, Stage, Timings
from tests.smart_embedder.fakes import FakeModel, FakeReranker, loaded
from tests.smart_embedder.further_models import FakeLoader, entries
from tests.support.in_process import served


def scope_of(context: RequestContext, *headers: tuple[bytes, bytes]) -> dict[str, object]:
    """Of a request over HTTP/1.1."""
    state = {"context": context}
    return {"type": "http", "http_version": "1.1", "headers": list(headers), "state": state}


@pytest.mark.parametrize("from_body", [False, True])
@pytest.mark.parametrize("held", [LARGE_ANSWER_BYTES - 1, LARGE_ANSWER_BYTES])
async def test_a_large_response_is_rendered_off_the_event_loop(held, from_body) -> None:
    """The size includes the body and the memory that the response needs."""
    rendered_by = []
    service = create_app(Settings(api_token=None)).state.service
    context = RequestContext("an id", "/", None, "192.0.2.1")
    if from_body:
        context.answer.body_bytes = held
    else:
        context.answer.reserve(held, "it", "send less")

    def render():
        rendered_by.append(threading.current_thread().name)
        yield b"{}"

    await Call(Request(scope_of(context)), service, AsyncExitStack()).render(render)
    (thread,) = rendered_by
    (stage,) = context.stages
    assert (stage.name, stage.ended >= stage.began) == ("render", True)
    assert thread.startswith("render" if held == LARGE_ANSWER_BYTES else "MainThread")


async def test_no_endpoint_parses_unused_queries_or_cookies(monkeypatch) -> None:
    """FastAPI would: 64 KiB of options take 20 ms, backslashes in cookies quadratic time."""
    parsed = []
    monkeypatch.setattr(datastructures, "parse_qsl", lambda text, **_: parsed.append(text) or [])
    monkeypatch.setattr(requests, "cookie_parser", lambda text: parsed.append(text) or {})
    headers = {"Cookie": 'a="' + "\\" * 30_000, "Content-Type": "application/jsonl"}
    async with served(loaded(FakeModel())) as (_, client):
        for path in ("/", "/health", "/v1/models", "/docs", "/nowhere"):
            await client.get(f"{path}?{'a&' * 30_000}", headers=headers)
        for path in ("/embeddings/", "/rerank"):
            await client.post(path, headers=headers, content=b"{}")
    assert max(map(len, parsed), default=0) == 0


class Client:
    """A client that disconnects on demand, and counts the calls of `receive`."""

    def __init__(self) -> None:
        self.leaves, self.waits = asyncio.Event(), asyncio.Event()
        self.calls = 0
        self.request = Request({"type": "http", "headers": []}, self.receive)

    async def receive(self) -> dict[str, object]:
        self.calls += 1
        if self.calls == 1:  # The rest of a body, which is not read any more.
            return {"type": "http.request", "body": b"", "more_body": False}
        self.waits.set()
        await self.leaves.wait()
        return {"type": "http.disconnect"}


async def test_counts_and_stages_are_recorded_for_the_log_and_the_trace() -> None:
    client = Client()
    context = RequestContext("an id", "/", None, "192.0.2.1")
    client.request.scope.update(scope_of(context, (b"priority", b"u=6")))
    stages = (Stage("queue", 1.0, 2.0), Stage("forward", 2.0, 3.0))
    result = RerankResult([], [], [], [], 7, Timings(0.001, 0.02, 0.3, 4.0, stages))

    async def work(models: LoadedModels, sent: RerankRequest) -> RerankResult:
        assert models is held
        assert (sent.client, sent.model, sent.is_bulk) == ("address:192.0.2.1", None, True)
        assert sent.answer is context.answer
        return result

    held, service = loaded(FakeModel()), create_app(Settings(api_token=None)).state.service
    body = {"query": "a", "ignored": "b"}
    call = Call(client.request, service, AsyncExitStack(), body)
    call.leased[None] = held
    counter, request = service.metrics.pairs, RerankRequest("a", [])
    assert await call.run(work, request, None, counter, pairs=3) is result
    assert service.metrics.total(counter) == 3
    times = {"tokenize_ms": 1.0, "queue_ms": 20.0, "inference_ms": 300.0}
    assert context.counts == {"pairs": 3, "tokens": 7} | times
    assert context.stages == list(stages)
    assert body == {}, "it is held until the answer has been sent"


async def test_a_model_is_leased_once_until_the_request_is_answered() -> None:
    models = FakeLoader()
    further = {"loader": models, "models": entries("a", "b"), "model_memory_threshold": 1.0}
    async with served(loaded(FakeModel(), 100), **further) as (service, _):
        leases = AsyncExitStack()
        call = Call(Client().request, service, leases)
        a, b = map(service.catalogue.find, ("a", "b"))
        first = await call.lease(a)
        assert await call.lease(a) is first
        assert (await call.lease(b)) is not first
        assert await call.lease(None) == service.engine.loaded()
        assert call.leased == {"a": first, "b": await call.lease(b), None: service.engine.loaded()}
        assert models.loads == ["a", "b"]
        unloading = asyncio.ensure_future(service.engine.unload("a"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not unloading.done()
        await leases.aclose()
        await unloading


async def test_an_embedder_and_a_reranker_with_the_same_name_are_distinguished() -> None:
    models = loaded(FakeModel(), 100, FakeReranker())
    one = {"embedding_model": "a/one", "reranker_model": "a/one"}
    async with served(models, **one) as (service, client):
        tasks = [service.status_of(model).task for model in service.catalogue.models]
        assert tasks == ["embed", "rerank"]
        assert (await client.get("/v1/models/a/one")).json()["task"] == "embed"


@pytest.mark.parametrize("overdue", [False, True])
async def test_a_lease_waits_no_longer_than_the_request_timeout(overdue: bool) -> None:
    models = FakeLoader()
    models.held = True
    further = {"loader": models, "models": entries("a"), "model_memory_threshold": 1.0}
    async with served(loaded(FakeModel(), 100), **further) as (service, _):
        deadline = asyncio.get_running_loop().time() + (-1.0 if overdue else 60.0)
        async with AsyncExitStack() as leases:
            call = Call(Client().request, service, leases, deadline=deadline)
            leasing = asyncio.ensure_future(call.lease(service.catalogue.find("a")))
            if overdue:
                with pytest.raises(UnavailableError, match="a is still being loaded"):
                    await leasing
            await asyncio.to_thread(models.entered.acquire)
            models.gate.release()
            if not overdue:
                assert (await leasing).embedder.name == "a"


async def test_the_status_is_loading_healthy_unhealthy_or_draining() -> None:
    app = create_app(Settings(api_token=None))
    loading = app.state.service
    assert loading.status == ("loading", "the models are being loaded")
    transport = ASGITransport(app)
    async with AsyncClient(transport=transport, base_url="http://service") as client:
        health = await client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        assert (health.json()["reason"], health.json()["download"]) == (loading.status[1], None)
        assert (await client.get("/health/live")).status_code == 200
        refused = await client.post("/embeddings/", json={"sentences": ["a"]})
        assert (refused.status_code, refused.json()["code"]) == (503, "loading")
        assert int(refused.headers["retry-after"]) >= 1
    assert loading.metrics.value("embedding_requests_rejected_total", reason="loading") == 1
    async with served(loaded(FakeModel())) as (service, _):
        assert service.status == ("healthy", None)
        service.drain.announced = True
        assert service.status == ("draining", "the service is shutting down")
        service.drain.announced = False
    assert service.status == ("draining", "the service is shutting down")

    def fail(_: Settings) -> None:
        raise StartupError("there is no such folder")

    failed = create_app(Settings(api_token=None), loader=fail).state.service
    with pytest.raises(StartupError):
        await failed.engine.start()
    for failed.drain.announced in (False, True):
        expected = ("unhealthy", "the models could not be loaded; the log says why")
        assert failed.status == expected
    await failed.engine.close()


async def test_only_the_request_timeout_raises_inference_timeout() -> None:
    with pytest.raises(InferenceTimeoutError, match=r"longer than 0\.001 seconds"):
        async with time_limit(0.001):
            await asyncio.Event().wait()
    with pytest.raises(TimeoutError, match="of a socket"):
        async with time_limit(60):
            raise TimeoutError("of a socket")


@pytest.mark.parametrize(
    ("how", "ends"),
    [
        ("it leaves", ClientGoneError),
        ("it is given up", asyncio.CancelledError),
        ("its work fails", ValueError),
        ("its work ends", str),
    ],
)
async def test_work_is_cancelled_when_the_client_disconnects(how, ends) -> None:
    client, is_done, ended = Client(), asyncio.Event(), []

    async def work() -> str:
        try:
            await is_done.wait()
            if how == "its work fails":
                raise ValueError(how)
        finally:
            await asyncio.sleep(0)
            ended.append("work")
        return "done"

    answer = asyncio.ensure_future(cancel_on_disconnect(client.request, work()))
    await client.waits.wait()
    assert not answer.done()
    if how == "it leaves":
        client.leaves.set()
    elif how == "it is given up":
        answer.cancel()
    else:
        is_done.set()
    (outcome,) = await asyncio.gather(answer, return_exceptions=True)
    assert (type(outcome), ended) == (ends, ["work"])
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize(
    ("header", "bulk"),
    [
        (None, False), ("u=3", False), ("u=4", True), ("u=7", True), ("u=8", False),
        ("i, u=6;a=b", True), ("u=?1", False), ("u=4.5", False), ("u=(5 6)", False),
        ("i|u=5", True), ("u=6|u=1", False), ("u=", False), ("u=\xe4", False), (",", False),
    ],
)  # fmt: skip
def test_a_priority_with_an_integer_urgency_above_3_is_bulk(header, bulk) -> None:
    lines = [] if header is None else header.encode("latin-1").split(b"|")
    assert is_bulk(with_priority(*lines)) is bulk


def with_priority(*lines: bytes) -> Request:
    return Request({"type": "http", "headers": [(b"priority", line) for line in lines]})


async def test_on_a_shared_path_the_discriminator_decides_on_errors_and_metrics() -> None:
    async with served(loaded(FakeModel())) as (service, client):
        openais = await client.post("/embeddings", json={"input": ["a"]})
        assert (openais.status_code, openais.json()["object"]) == (200, "list")
        wrong = await client.post("/embeddings", json={"input": ["a", 7]})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "input")
        assert "the field input[1] is a number" in wrong.json()["detail"].lower()
        neither = await client.post("/embeddings", json={"sentence": []})
        assert (neither.status_code, "error" in neither.json()) == (422, True)
        assert "other APIs on this path have the field input (OpenAI)" in neither.json()["detail"]
        for body, kind in ((b"null", "null"), (b"[]", "a list of 0 items"), (b"7", "a number")):
            for path in ("/embeddings", "/models/fake/embed"):
                refused = await client.post(path, content=body)
                assert refused.status_code == 422
                assert f"The body is {kind}: send an object such as" in refused.text
        both = await client.post("/embeddings", json={"sentences": ["a"], "input": ["b"]})
        assert both.status_code == 422
        value = service.metrics.value
        # Requests count as OpenAI's if the body has its field.
        labels = {"status": "success", "endpoint": "/v1/embeddings"}
        assert value("embedding_requests_total", **labels) == 1
        labels["status"] = "client_error"
        assert value("embedding_requests_total", **labels) == 1
