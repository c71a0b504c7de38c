"""Traces: which requests have a span, what stands in it, and what is sent to an OTLP receiver."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
from httpx2 import ASGITransport, AsyncClient
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NoOpTracer, SpanKind, Tracer
from structlog.testing import capture_logs

from smart_embedder import __version__
from smart_embedder.api.context import context_of
from smart_embedder.engine.records import Stage
from smart_embedder.main import create_app
from smart_embedder.middleware import tracing
from smart_embedder.middleware.tracing import QuietExporter, TraceRequests, Traces
from tests.engine.fakes import FakeModel, loaded, loading, settings_of
from tests.middleware.exchange import Inner, exchange, header
from tests.support.collector import run_collector
from tests.support.script import run_script

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


@pytest.fixture
def spans() -> InMemorySpanExporter:
    """What was sent."""
    return InMemorySpanExporter()


@pytest.fixture
def tracer(spans: InMemorySpanExporter) -> Tracer:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return provider.get_tracer("test")


async def test_a_request_for_work_continues_the_clients_trace_and_returns_its_own(
    spans, tracer
) -> None:
    parent = (b"traceparent", SAMPLED["traceparent"].encode())
    headers = [parent, (b"tracestate", b""), (b"baggage", b"secret")]
    _, sent = await exchange(TraceRequests(Inner(), tracer), headers=headers, path="/embeddings")
    (span,) = spans.get_finished_spans()
    assert (span.name, span.kind) == ("POST /embeddings/", SpanKind.SERVER)
    assert f"{span.context.trace_id:x}-{span.parent.span_id:016x}" == f"{TRACE}-{PARENT}"
    returned = f"00-{TRACE}-{span.context.span_id:016x}-01"
    assert header(sent, b"traceparent") == returned.encode()
    _, sent = await exchange(TraceRequests(Inner(), NoOpTracer()))
    assert header(sent, b"traceparent") is None
    for method, path in (("GET", "/health"), ("POST", "/nowhere")):
        inner = Inner()
        await exchange(TraceRequests(inner, tracer), method=method, path=path)
        assert inner.called
    assert len(spans.get_finished_spans()) == 1, "nothing else is traced"


@pytest.mark.parametrize(
    ("status", "native", "code", "error"),
    [
        (200, None, None, None),
        (422, 422, "invalid_request", None),
        (503, 503, "queue_full", "queue_full"),
        (500, None, None, "internal_error"),
        # A dialect may have another status for it.
        (400, 504, "timeout", "timeout"),
        (None, None, None, "internal_error"),
    ],
)
async def test_a_span_tells_status_counts_and_stages_and_fails_where_the_service_did(
    spans, tracer, status, native, code, error
) -> None:
    before, began, after = time.time(), time.perf_counter(), time.time()
    stages = [
        Stage("queue", began + 0.25, began + 0.5),
        Stage("forward", began + 0.5, began + 2, "m3", 1.25),
    ]

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        context = context_of(scope)
        context.counts |= {"sentences": 2, "tokens": 9, "tokenize_ms": 1.0}
        context.stages += stages
        context.error_status, context.error_code = native, code
        if status is None:
            raise ZeroDivisionError
        await send({"type": "http.response.start", "status": status, "headers": []})

    request_id = [(b"x-request-id", b"mine")]
    with suppress(ZeroDivisionError):
        await exchange(TraceRequests(app, tracer), path="/rerank", headers=request_id)
    *children, request = spans.get_finished_spans()
    assert request.status.description == error
    assert request.status.is_ok == (error is None)
    assert dict(request.attributes) == {
        "http.request.method": "POST",
        "http.route": "/rerank",
        "http.response.status_code": status or 500,
        "smart_embedder.request_id": "mine",
        "smart_embedder.sentences": 2,
        "smart_embedder.tokens": 9,
    }
    for child, stage in zip(children, stages, strict=True):
        assert (child.name, child.parent.span_id) == (stage.name, request.context.span_id)
        begun_at = child.start_time / 1e9 - (stage.began - began)
        assert before - 1e-3 <= begun_at <= after + 1e-3  # Two clocks are read after each other.
        length = (child.end_time - child.start_time) / 1e9
        assert length == pytest.approx(stage.ended - stage.began, abs=1e-6)
    queue, forward = (dict(child.attributes) for child in children)
    assert queue == {}
    assert forward == {"smart_embedder.model": "m3", "smart_embedder.device_s": 1.25}


# What is sent.


def attributes(span: Any) -> dict[str, Any]:
    return {
        each.key: getattr(each.value, str(each.value.WhichOneof("value")))
        for each in span.attributes
    }


@pytest.mark.parametrize("path", ["", "/", "/v1/traces", "/v1/traces/"])
async def test_spans_are_sent_below_the_address_unless_the_client_leaves_them_unsampled(
    path: str,
) -> None:
    unsampled = f"00-{TRACE}-{PARENT}-00".encode()
    with run_collector() as collector:
        traces = Traces(collector.url + path, "search")
        app = TraceRequests(Inner(), traces.tracer)
        _, sent = await exchange(app, headers=[(b"traceparent", unsampled)])
        assert header(sent, b"traceparent").endswith(b"-00")
        await exchange(app, path="/rerank")
        await asyncio.to_thread(traces.close)
        (span,) = collector.wait_for(1)
    assert (span.name, span.parent_span_id, span.status.code) == ("POST /rerank", b"", 0)
    assert (collector.paths, collector.services) == ({"/v1/traces"}, {"search"})
    assert __version__.encode() in collector.raw


class Receiver:
    """Takes spans while it is `up`; each try takes `seconds` of the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.up, self.tries, self.seconds, self.now = True, 0, 0.0, 1000.0
        self.ended = False
        monkeypatch.setattr(tracing.time, "monotonic", lambda: self.now)

    def export(self, _spans: Any) -> SpanExportResult:
        self.tries += 1
        self.now += self.seconds
        return SpanExportResult.SUCCESS if self.up else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.ended = True


def test_lost_spans_are_told_once_and_so_is_that_they_are_delivered_again(monkeypatch) -> None:
    receiver = Receiver(monkeypatch)
    exporter = QuietExporter(receiver, "http://collector:4318")  # type: ignore[arg-type]
    results = []
    with capture_logs() as log:
        for receiver.up in (True, False, False, True, True, False):
            results.append(exporter.export([]) is SpanExportResult.SUCCESS)
    assert results == [True, False, False, True, True, False]
    assert [(each["event"], each["log_level"], each["receiver"]) for each in log] == [
        ("traces_not_delivered", "warning", "http://collector:4318"),
        ("traces_delivered_again", "info", "http://collector:4318"),
        ("traces_not_delivered", "warning", "http://collector:4318"),
    ]
    exporter.shutdown()
    assert receiver.ended


@pytest.mark.parametrize(
    ("before", "fails", "seconds", "tries"),
    [
        # A failure before was none of the end.
        ([False, True], [False] * 5, 0.0, 5),
        ([False, True], [False, True, False], 0.0, 2),
        # Two seconds are for all of them.
        ([False, True], [False] * 9, 0.7, 3),
        # One that is down is not tried again.
        ([False], [True], 0.0, 0),
    ],
)
def test_at_the_end_it_stops_at_the_first_failure_or_after_two_seconds(
    before, fails, seconds, tries, monkeypatch
) -> None:
    receiver = Receiver(monkeypatch)
    exporter = QuietExporter(receiver, "http://collector")  # type: ignore[arg-type]
    for receiver.up in before:
        exporter.export([])
    receiver.tries, receiver.seconds = 0, seconds
    exporter.limit_time()
    for fail in fails:
        receiver.up = not fail
        exporter.export([])
    assert receiver.tries == tries


def test_of_a_receiver_only_its_host_is_told_and_its_library_tells_nothing(caplog) -> None:
    """The path may hold a key."""
    with capture_logs() as log:
        traces = Traces("http://127.0.0.1:9/a-key/v1/traces", "search")
        traces.tracer.start_span("a").end()
        traces.close()
    assert [(each["event"], each["receiver"]) for each in log] == [
        ("traces_not_delivered", "http://127.0.0.1:9")
    ]
    assert not [each for each in caplog.records if each.name.startswith("opentelemetry.exporter")]


# Of the whole service.

SECRET = "zebra"
EMBED = {"sentences": [f"{SECRET} one", f"{SECRET} two"], "return_colbert": False}
STAGES = ["tokenize", "queue", "forward", "render"]


@asynccontextmanager
async def traced(endpoint: str) -> AsyncIterator[AsyncClient]:
    """A client of a service that sends all spans until the block ends."""
    ready, models = asyncio.Event(), replace(loaded(FakeModel()), late_interaction=True)
    told = {"otlp_endpoint": endpoint, "otel_service_name": "search", "api_token": "hush-hush"}
    settings, load = settings_of(models, **told), loading(models)
    app = create_app(settings, loader=load, on_ready=lambda _: ready.set())
    client = AsyncClient(transport=ASGITransport(app), base_url="http://service")
    async with app.router.lifespan_context(app), client:
        await ready.wait()
        yield client


async def test_a_request_is_five_spans_in_the_clients_own_trace() -> None:
    with run_collector() as collector:
        async with traced(collector.url) as client:
            headers = SAMPLED | {"X-Request-ID": "first", "Authorization": "Bearer hush-hush"}
            answer = await client.post("/embeddings/", json=EMBED, headers=headers)
    assert answer.status_code == 200
    *stages, request = sorted(collector.spans, key=lambda span: span.name == "POST /embeddings/")
    assert request.name == "POST /embeddings/"
    assert [span.name for span in sorted(stages, key=lambda s: s.start_time_unix_nano)] == STAGES
    assert {span.trace_id.hex() for span in [request, *stages]} == {TRACE}
    assert request.parent_span_id.hex() == PARENT
    assert {span.parent_span_id for span in stages} == {request.span_id}
    assert answer.headers["traceparent"] == f"00-{TRACE}-{request.span_id.hex()}-01"
    assert attributes(request)["smart_embedder.request_id"] == "first"
    tokens = answer.json()["usage"]["total_tokens"]
    assert attributes(request)["smart_embedder.tokens"] == tokens
    assert collector.services == {"search"}
    for span in stages:
        assert request.start_time_unix_nano <= span.start_time_unix_nano
        assert span.start_time_unix_nano <= span.end_time_unix_nano <= request.end_time_unix_nano
    forward = next(span for span in stages if span.name == "forward")
    assert attributes(forward)["smart_embedder.model"] == "fake"
    # The span also holds the ways to the device's thread and back, which have no limit.
    on_device = attributes(forward)["smart_embedder.device_s"]
    assert on_device * 1e3 == pytest.approx(answer.json()["timings_ms"]["inference"], abs=0.001)
    assert on_device * 1e9 <= forward.end_time_unix_nano - forward.start_time_unix_nano + 1000


async def test_what_fails_and_what_is_refused_is_traced_and_no_text_or_token_ever() -> None:
    with run_collector() as collector:
        async with traced(collector.url) as client:
            await client.post("/rerank", json=EMBED, headers={"Authorization": f"Bearer {SECRET}"})
            client.headers["Authorization"] = "Bearer hush-hush"
            await client.post("/embeddings/", json={"sentences": [SECRET, 1], SECRET: 1})
            await client.post("/rerank", json={"query": SECRET, "passages": [SECRET] * 3})
            await client.post(f"/{SECRET}", json=EMBED)
            await client.get("/health")
    spans = collector.spans
    requests = [span for span in spans if span.name.startswith("POST ")]
    assert [attributes(span)["http.response.status_code"] for span in requests] == [401, 422, 200]
    assert len({span.trace_id for span in requests}) == 3
    assert attributes(requests[2])["smart_embedder.passages"] == 3
    # Late interaction runs the query first, and then the passages.
    rerank = [span.name for span in spans if span.parent_span_id == requests[2].span_id]
    assert rerank == ["tokenize", "queue", "forward", "queue", "forward", "render"]
    assert SECRET.encode() not in collector.raw
    assert b"hush" not in collector.raw


def test_a_receiver_that_never_answers_does_not_hold_up_the_end(monkeypatch) -> None:
    monkeypatch.setattr(tracing, "_BATCH_TIMEOUT_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent, capture_logs() as log:
        traces = Traces(f"http://127.0.0.1:{silent.getsockname()[1]}", "search")
        traces.tracer.start_span("a").end()
        traces.close()
    assert [each["event"] for each in log] == ["traces_not_delivered"]


SERVE = """
import asyncio, sys
from httpx2 import ASGITransport, AsyncClient
from smart_embedder.main import create_app
from tests.engine.fakes import FakeModel, loaded, loading, settings_of

async def serve():
    ready = asyncio.Event()
    models = loaded(FakeModel())
    app = create_app(settings_of(models), loader=loading(models), on_ready=lambda _: ready.set())
    client = AsyncClient(transport=ASGITransport(app), base_url="http://service")
    async with app.router.lifespan_context(app), client:
        await ready.wait()
        parent = {"traceparent": sys.argv[1]}
        answer = await client.post("/embeddings/", json={"sentences": ["a"]}, headers=parent)
    assert answer.status_code == 200 and "traceparent" not in answer.headers

asyncio.run(serve())
print(*sys.modules)
"""


def test_without_an_endpoint_nothing_is_sent_and_no_tracing_library_imported() -> None:
    """Whatever OpenTelemetry's own variables say.

    FastAPI imports its API.
    """
    told = {"FASTAPI_OTEL_AUTO_CONFIGURE": "true", "OTEL_BSP_SCHEDULE_DELAY": "1"}
    with run_collector() as collector:
        told["OTEL_EXPORTER_OTLP_ENDPOINT"] = collector.url
        served = run_script(SERVE, SAMPLED["traceparent"], **told)
    assert served.returncode == 0, served.stderr
    assert "smart_embedder.middleware.observe" in served.stdout.split()
    assert not {*served.stdout.split()} & {
        "opentelemetry.sdk.trace",
        "opentelemetry.exporter",
        "smart_embedder.middleware.tracing",
    }
    assert collector.raw == b""
