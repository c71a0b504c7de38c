"""Traces of the service, as an OTLP receiver gets them."""

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from http.server import ThreadingHTTPServer
from typing import Any
from unittest.mock import patch

import pytest
from httpx2 import ASGITransport, AsyncClient
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.trace.export import SpanExportResult
from structlog.testing import capture_logs

from app.main import create_app
from app.middleware import tracing
from app.middleware.tracing import Exporter, Traces
from smart_embedder import __version__
from tests.smart_embedder.fakes import FakeModel, loaded, loading, settings_of
from tests.support.answering_http import Handler, serving, url_of
from tests.support.collector import run_collector

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
UNSAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
SECRET = "zebra"
EMBED = {"sentences": [f"{SECRET} one", f"{SECRET} two"], "return_colbert": False}
STAGES = ["tokenize", "queue", "forward", "render"]


@asynccontextmanager
async def traced(endpoint: str, model: FakeModel | None = None) -> AsyncIterator[AsyncClient]:
    """A client of a service that sends its spans to `endpoint`, the last ones at the end."""
    ready, models = asyncio.Event(), replace(loaded(model or FakeModel()), late_interaction=True)
    options = {"otlp_endpoint": endpoint, "api_token": "hush-hush"}
    settings, load = settings_of(models, **options), loading(models)
    with patch.dict(os.environ, OTEL_SERVICE_NAME="search"):
        app = create_app(settings, loader=load, on_ready=lambda _: ready.set())
    client = AsyncClient(transport=ASGITransport(app), base_url="http://service")
    client.headers["Authorization"] = "Bearer hush-hush"
    async with app.router.lifespan_context(app), client:
        await ready.wait()
        yield client


def attributes(span: Any) -> dict[str, Any]:
    return {
        attribute.key: getattr(attribute.value, str(attribute.value.WhichOneof("value")))
        for attribute in span.attributes
    }


async def test_a_request_has_five_spans_in_the_clients_trace() -> None:
    before = time.time_ns()
    with run_collector() as collector:
        async with traced(collector.url) as client:
            headers = SAMPLED | {"X-Request-ID": "first", "tracestate": "", "baggage": SECRET}
            answer = await client.post("/embeddings", json=EMBED, headers=headers)
    assert answer.status_code == 200
    *stages, request = sorted(collector.spans, key=lambda span: span.name == "POST /embeddings/")
    assert (request.name, request.kind) == ("POST /embeddings/", Span.SPAN_KIND_SERVER)
    assert [span.name for span in sorted(stages, key=lambda s: s.start_time_unix_nano)] == STAGES
    assert {span.trace_id.hex() for span in [request, *stages]} == {TRACE}
    assert request.parent_span_id.hex() == PARENT
    assert {span.parent_span_id for span in stages} == {request.span_id}
    assert answer.headers["traceparent"] == f"00-{TRACE}-{request.span_id.hex()}-01"
    assert request.status.code == Status.STATUS_CODE_UNSET
    assert attributes(request) == {
        "http.request.method": "POST",
        "http.route": "/embeddings/",
        "http.response.status_code": 200,
        "smart_embedder.request_id": "first",
        "smart_embedder.sentences": 2,
        "smart_embedder.tokens": answer.json()["usage"]["total_tokens"],
    }
    assert collector.services == {"search"}
    assert __version__.encode() in collector.raw
    assert before <= request.start_time_unix_nano
    for span in stages:
        # Two clocks are read one after the other.
        assert request.start_time_unix_nano - 1_000_000 <= span.start_time_unix_nano
        assert span.start_time_unix_nano <= span.end_time_unix_nano <= request.end_time_unix_nano
    facts = {span.name: attributes(span) for span in stages}
    assert (facts["queue"], facts["render"]) == ({"smart_embedder.model": "fake"}, {})
    assert facts["forward"]["smart_embedder.model"] == "fake"
    # The span includes the time to and from the device's thread, which has no limit.
    on_device = facts["forward"]["smart_embedder.device_s"]
    assert on_device * 1e3 == pytest.approx(answer.json()["timings_ms"]["inference"], abs=0.001)
    forward = next(span for span in stages if span.name == "forward")
    assert on_device * 1e9 <= forward.end_time_unix_nano - forward.start_time_unix_nano + 1000


async def test_failed_and_refused_requests_are_traced_without_texts_or_tokens() -> None:
    model = FakeModel()
    with run_collector() as collector:
        async with traced(collector.url, model) as client:
            wrong = {"Authorization": f"Bearer {SECRET}", "User-Agent": SECRET}
            await client.post(f"/rerank?{SECRET}", json=EMBED, headers=wrong)
            await client.post("/embeddings/", json={"sentences": [SECRET, 1], SECRET: 1})
            await client.post("/rerank", json={"query": SECRET, "passages": [SECRET] * 3})
            model.failures = [ValueError(f"cannot compute {SECRET}")]
            # This dialect answers 424.
            await client.post("/embed", json={"inputs": SECRET})
            await client.post(f"/{SECRET}", json=EMBED)
            await client.get("/health")
    spans = collector.spans
    requests = [span for span in spans if span.name.startswith("POST ")]
    statuses = [attributes(span)["http.response.status_code"] for span in requests]
    assert statuses == [401, 422, 200, 424]
    assert len({span.trace_id for span in requests}) == 4
    assert {span.parent_span_id for span in requests} == {b""}
    assert [span.status.message for span in requests] == ["", "", "", "inference_failed"]
    assert requests[3].status.code == Status.STATUS_CODE_ERROR
    assert attributes(requests[2])["smart_embedder.passages"] == 3
    # Late interaction runs the query, then the passages.
    rerank = [span.name for span in spans if span.parent_span_id == requests[2].span_id]
    assert rerank == ["tokenize", "queue", "forward", "queue", "forward", "render"]
    assert SECRET.encode() not in collector.raw
    assert b"hush" not in collector.raw


@pytest.mark.parametrize("path", ["/", "/v1/traces/"])
async def test_spans_are_sent_to_v1_traces_unless_the_clients_trace_is_unsampled(
    path: str,
) -> None:
    with run_collector() as collector:
        async with traced(collector.url + path) as client:
            unsampled = await client.post("/embeddings/", json=EMBED, headers=UNSAMPLED)
            await client.post("/rerank", json={"query": "a", "passages": []})
            long = {"traceparent": SAMPLED["traceparent"], "tracestate": f"a={'b' * 2000}"}
            shortened = await client.post("/rerank", json={"query": "a"}, headers=long)
    assert unsampled.headers["traceparent"].startswith(f"00-{TRACE}-")
    assert unsampled.headers["traceparent"].endswith("-00")
    assert shortened.headers["traceparent"].startswith(f"00-{TRACE}-")
    assert [span.name for span in collector.spans] == ["POST /rerank"] * 2
    assert [span.trace_state for span in collector.spans] == ["", ""]
    assert collector.paths == {"/v1/traces"}


# A receiver that accepts no spans.


def test_lost_spans_are_logged_once_and_so_is_that_they_are_delivered_again(caplog) -> None:
    """The log names only the host, because the path may hold a key."""
    answers = iter([200, 400, 400, 200, 200, 400])

    class Receiver(Handler):
        def respond(self) -> None:
            self.read_body()
            self.answer(next(answers))

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Receiver)) as server:
        url = url_of(server)
        exporter = Exporter(f"{url}/a-key")
        with capture_logs() as log:
            results = [exporter.export([]) is SpanExportResult.SUCCESS for _ in range(6)]
        exporter.shutdown()
    assert results == [True, False, False, True, True, False]
    assert [(line["event"], line["log_level"], line["receiver"]) for line in log] == [
        ("traces_not_delivered", "warning", url),
        ("traces_delivered_again", "info", url),
        ("traces_not_delivered", "warning", url),
    ]
    assert not [log for log in caplog.records if log.name.startswith("opentelemetry.exporter")]


def test_a_receiver_that_never_answers_does_not_delay_the_shutdown(monkeypatch) -> None:
    """Not even with many batches left."""
    monkeypatch.setattr(tracing, "_EXPORT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, capture_logs() as log:
        silent.setblocking(False)
        traces = Traces(f"http://127.0.0.1:{silent.getsockname()[1]}")
        for _ in range(8000):
            traces.tracer.start_span("a").end()
        traces.close()
        attempts = 0
        with suppress(BlockingIOError):
            while attempts < 100:
                silent.accept()[0].close()
                attempts += 1
    assert [line["event"] for line in log] == ["traces_not_delivered"]
    assert 0 < attempts < 8  # Of 16 batches.
