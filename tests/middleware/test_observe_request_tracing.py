"""Which requests have a span, and what stands in it."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from smart_embedder.api.context import context_of
from smart_embedder.middleware.observe import TraceRequests
from smart_embedder.observability.tracing import Stage
from tests.middleware.exchange import Inner, exchange, header

PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Spans:
    """A tracer that keeps what it is told, and the span of each request."""

    def __init__(self, traceparent: str | None = "00-span") -> None:
        self.begun: list[tuple[str, Mapping[str, str]]] = []
        self.ended: list[tuple[Mapping[str, Any], Sequence[Stage], str | None]] = []
        self.traceparent = traceparent

    def begin(self, name: str, context: Mapping[str, str]) -> "Spans":
        self.begun.append((name, context))
        return self

    def end(self, *facts: Any) -> None:
        self.ended.append(facts)

    def close(self) -> None:
        """Nothing is left."""


async def test_a_request_for_work_continues_the_clients_trace_and_returns_its_own() -> None:
    spans = Spans()
    headers = [(b"traceparent", PARENT), (b"tracestate", b""), (b"baggage", b"secret")]
    _, sent = await exchange(TraceRequests(Inner(), spans), headers=headers, path="/embeddings")
    assert spans.begun == [("POST /embeddings/", {"traceparent": PARENT.decode()})]
    assert header(sent, b"traceparent") == b"00-span"
    _, sent = await exchange(TraceRequests(Inner(), Spans(None)))
    assert header(sent, b"traceparent") is None


@pytest.mark.parametrize(("method", "path"), [("GET", "/health"), ("POST", "/nowhere")])
async def test_nothing_else_is_traced(method: str, path: str) -> None:
    spans, inner = Spans(), Inner()
    await exchange(TraceRequests(inner, spans), method=method, path=path)
    assert (inner.called, spans.begun, spans.ended) == (True, [], [])


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
    status, native, code, error
) -> None:
    spans, stage = Spans(), Stage("tokenize", 0.0, 1.0)

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        context = context_of(scope)
        context.counts |= {"sentences": 2, "tokens": 9, "tokenize_ms": 1.0}
        context.stages.append(stage)
        context.error_status, context.error_code = native, code
        if status is None:
            raise ZeroDivisionError
        await send({"type": "http.response.start", "status": status, "headers": []})

    try:
        context, _ = await exchange(TraceRequests(app, spans), path="/rerank")
    except ZeroDivisionError:
        context = None
    ((attributes, stages, told),) = spans.ended
    assert (stages, told) == ([stage], error)
    request_id = attributes["smart_embedder.request_id"]
    assert context is None or request_id == context.request_id
    assert attributes == {
        "http.request.method": "POST",
        "http.route": "/rerank",
        "http.response.status_code": status or 500,
        "smart_embedder.request_id": request_id,
        "smart_embedder.sentences": 2,
        "smart_embedder.tokens": 9,
    }
