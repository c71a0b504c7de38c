"""What is sent to an OTLP receiver, and what is said where it cannot be."""

import time
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SpanExportResult
from structlog.testing import capture_logs

from smart_embedder import __version__
from smart_embedder.observability import otlp
from smart_embedder.observability.otlp import OtlpTracer, QuietExporter
from smart_embedder.observability.tracing import Stage
from tests.support.collector import run_collector

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def attributes(span: Any) -> dict[str, Any]:
    return {
        each.key: getattr(each.value, str(each.value.WhichOneof("value")))
        for each in span.attributes
    }


@pytest.mark.parametrize("path", ["", "/", "/v1/traces", "/v1/traces/"])
def test_a_request_is_sent_with_its_stages_at_their_times(path: str) -> None:
    with run_collector() as collector:
        tracer = OtlpTracer(collector.url + path, "search")
        before = time.time_ns()
        began = time.perf_counter()
        after = time.time_ns()
        span = tracer.begin("POST /rerank", {"traceparent": f"00-{TRACE}-{PARENT}-01"})
        stages = [
            Stage("queue", began + 0.25, began + 0.5),
            Stage("forward", began + 0.5, began + 2, "m3", 1.25),
        ]
        told = span.traceparent
        span.end({"smart_embedder.tokens": 7}, stages, "queue_full")
        tracer.close()
        queue, forward, request = collector.wait_for(3)
    assert (collector.paths, collector.services) == ({"/v1/traces"}, {"search"})
    assert __version__.encode() in collector.raw
    assert told == f"00-{TRACE}-{request.span_id.hex()}-01"
    assert (request.name, request.kind) == ("POST /rerank", request.SPAN_KIND_SERVER)
    assert request.parent_span_id.hex() == PARENT
    assert attributes(request) == {"smart_embedder.tokens": 7}
    assert (request.status.code, request.status.message) == (2, "queue_full")
    for child, name, begin, end in (
        (queue, "queue", 0.25, 0.5),
        (forward, "forward", 0.5, 2),
    ):
        assert (child.name, child.parent_span_id) == (name, request.span_id)
        assert child.trace_id.hex() == TRACE
        moment = child.start_time_unix_nano - int(begin * 1e9)
        assert before - 1e6 <= moment <= after + 1e6  # Two clocks are read one after the other.
        length = child.end_time_unix_nano - child.start_time_unix_nano
        assert length / 1e9 == pytest.approx(end - begin, abs=1e-6)
    assert attributes(queue) == {}
    assert attributes(forward) == {"smart_embedder.model": "m3", "smart_embedder.device_s": 1.25}


def test_a_request_without_an_error_or_a_trace_begins_one_and_an_unsampled_one_is_not_sent() -> (
    None
):
    with run_collector() as collector:
        tracer = OtlpTracer(collector.url, "search")
        unsampled = tracer.begin("a", {"traceparent": f"00-{TRACE}-{PARENT}-00"})
        assert unsampled.traceparent is not None
        assert unsampled.traceparent.endswith("-00")
        unsampled.end({}, [Stage("queue", 1, 2)], None)
        tracer.begin("b", {}).end({}, [], None)
        tracer.close()
        (span,) = collector.wait_for(1)
    assert (span.name, span.parent_span_id, span.status.code) == ("b", b"", 0)


class Receiver:
    """Takes spans while it is `up`; each try takes `seconds` of the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.up, self.tries, self.seconds, self.now = True, 0, 0.0, 1000.0
        self.ended = False
        monkeypatch.setattr(otlp.time, "monotonic", lambda: self.now)

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
    ("fails", "seconds", "tries"),
    [
        ([False] * 5, 0.0, 5),
        ([False, True, False], 0.0, 2),
        # Two seconds are for all of them.
        ([False] * 9, 0.7, 3),
    ],
)
def test_at_the_end_it_stops_at_the_first_failure_or_after_two_seconds(
    fails, seconds, tries, monkeypatch
) -> None:
    receiver = Receiver(monkeypatch)
    exporter = QuietExporter(receiver, "http://collector")  # type: ignore[arg-type]
    for receiver.up in (False, True):  # A failure before was none of the end.
        exporter.export([])
    receiver.tries, receiver.seconds = 0, seconds
    exporter.limit_time()
    for fail in fails:
        receiver.up = not fail
        exporter.export([])
    assert receiver.tries == tries


def test_at_the_end_a_receiver_that_is_down_is_not_tried_again(monkeypatch) -> None:
    receiver = Receiver(monkeypatch)
    receiver.up = False
    exporter = QuietExporter(receiver, "http://collector")  # type: ignore[arg-type]
    exporter.export([])
    exporter.limit_time()
    assert exporter.export([]) is SpanExportResult.FAILURE
    assert receiver.tries == 1


def test_of_a_receiver_only_its_host_is_told_and_its_library_tells_nothing(caplog) -> None:
    """The path may hold a key."""
    with capture_logs() as log:
        tracer = OtlpTracer("http://127.0.0.1:9/a-key/v1/traces", "search")
        tracer.begin("a", {}).end({}, [], None)
        tracer.close()
    assert [(each["event"], each["receiver"]) for each in log] == [
        ("traces_not_delivered", "http://127.0.0.1:9")
    ]
    assert not [each for each in caplog.records if each.name.startswith("opentelemetry.exporter")]
