"""Traces: five spans for a request at a real OTLP receiver; none where no receiver is set."""

import socket
from pathlib import Path

import pytest

from tests.support.collector import Collector, run_collector
from tests.support.server import RunningServer, run_server

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
SECRET = "zebra"
EMBED = {"sentences": [f"{SECRET} one", f"{SECRET} two"], "return_colbert": False}
STAGES = ["tokenize", "queue", "forward", "render"]


@pytest.fixture
def collector():
    with run_collector() as running:
        yield running


@pytest.fixture
def traced(collector: Collector, tiny_m3: Path, tmp_path: Path):
    settings = {"EMBEDDING_MODEL": str(tiny_m3), "OTLP_ENDPOINT": collector.url}
    settings["OTEL_SERVICE_NAME"] = "search"
    with run_server(tmp_path, API_TOKEN="hush-hush", **settings) as server:
        server.wait_until_healthy()
        yield server


def client_of(server: RunningServer):
    return server.client(headers={"Authorization": "Bearer hush-hush"})


def attributes(span) -> dict[str, str | int]:
    kinds = {item.key: item.value.WhichOneof("value") for item in span.attributes}
    return {item.key: getattr(item.value, kinds[item.key]) for item in span.attributes}


def test_a_request_is_five_spans_in_the_clients_own_trace(collector, traced, tiny_m3) -> None:
    with client_of(traced) as client:
        answer = client.post(
            "/embeddings/", json=EMBED, headers=SAMPLED | {"X-Request-ID": "first"}
        )
    assert answer.status_code == 200
    *stages, request = sorted(
        collector.wait_for(5), key=lambda span: span.name == "POST /embeddings/"
    )
    assert request.name == "POST /embeddings/"
    assert [span.name for span in sorted(stages, key=lambda s: s.start_time_unix_nano)] == STAGES
    assert {span.trace_id.hex() for span in [request, *stages]} == {TRACE}
    assert request.parent_span_id.hex() == PARENT
    assert {span.parent_span_id for span in stages} == {request.span_id}
    assert answer.headers["traceparent"] == f"00-{TRACE}-{request.span_id.hex()}-01"
    assert attributes(request) == {
        "http.request.method": "POST",
        "http.route": "/embeddings/",
        "http.response.status_code": 200,
        "smart_embedder.request_id": "first",
        "smart_embedder.sentences": 2,
        "smart_embedder.tokens": answer.json()["usage"]["total_tokens"],
    }
    assert (collector.paths, collector.services) == ({"/v1/traces"}, {"search"})
    for span in stages:
        assert request.start_time_unix_nano <= span.start_time_unix_nano
        assert span.start_time_unix_nano <= span.end_time_unix_nano <= request.end_time_unix_nano
    (forward,) = [span for span in stages if span.name == "forward"]
    assert attributes(forward)["smart_embedder.model"] == tiny_m3.name
    # The span also holds the ways to the device's thread and back, which have no limit.
    on_device = attributes(forward)["smart_embedder.device_s"]
    assert on_device * 1e3 == pytest.approx(answer.json()["timings_ms"]["inference"], abs=0.001)
    assert on_device * 1e9 <= forward.end_time_unix_nano - forward.start_time_unix_nano + 1000


def test_what_fails_and_what_is_refused_is_traced_and_no_text_or_token_ever(
    collector, traced
) -> None:
    with client_of(traced) as client:
        client.post("/embeddings/", json={"sentences": [SECRET, 1], SECRET: 1})
        client.post("/rerank", json=EMBED, headers={"Authorization": f"Bearer {SECRET}"})
        client.post("/rerank", json={"query": SECRET, "passages": [SECRET] * 3})
        client.post(f"/{SECRET}", json=EMBED)
        client.get("/health")
    assert traced.stop() == 0
    spans = collector.spans
    requests = [span for span in spans if span.name.startswith("POST ")]
    assert [attributes(span)["http.response.status_code"] for span in requests] == [422, 401, 200]
    assert len({span.trace_id for span in requests}) == 3
    assert attributes(requests[2])["smart_embedder.passages"] == 3
    # Late interaction runs the query first, and then the passages.
    rerank = [span.name for span in spans if span.parent_span_id == requests[2].span_id]
    assert rerank == ["tokenize", "queue", "forward", "queue", "forward", "render"]
    assert SECRET.encode() not in collector.raw
    assert b"hush" not in collector.raw


def test_a_collector_that_never_answers_does_not_hold_up_the_end(tiny_m3, tmp_path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        settings = {"EMBEDDING_MODEL": str(tiny_m3), "OTLP_ENDPOINT": endpoint}
        with run_server(tmp_path, **settings) as server, server.client() as client:
            server.wait_until_healthy()
            assert client.post("/embeddings/", json=EMBED).status_code == 200
            server.process.terminate()
            assert server.process.wait(60) == 0


def test_without_an_endpoint_nothing_is_sent_and_no_tracing_library_imported(
    collector, tiny_m3, tmp_path
) -> None:
    """Whatever OpenTelemetry's own variables say.

    Two libraries import parts of it on their own: FastAPI its API, and redis its SDK for metrics.
    """
    others = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "FASTAPI_OTEL_AUTO_CONFIGURE": "true",
        "OTEL_BSP_SCHEDULE_DELAY": "1",
    }
    module = "tests.support.reporting_server"
    with run_server(tmp_path, module, EMBEDDING_MODEL=str(tiny_m3), **others) as server:
        server.wait_until_healthy()
        with server.client() as client:
            answer = client.post("/embeddings/", json=EMBED, headers=SAMPLED)
        assert answer.status_code == 200
        assert "traceparent" not in answer.headers
        assert server.stop() == 0
    (report,) = [line for line in server.lines if line.startswith("imported:")]
    imported = set(report.split())
    assert "smart_embedder.observability.tracing" in imported
    assert not imported & {
        "opentelemetry.sdk.trace",
        "opentelemetry.exporter",
        "smart_embedder.observability.otlp",
    }
    assert collector.raw == b""
