"""Send traces of requests to an OTLP receiver; imported only if OTLP_ENDPOINT is set."""

import logging
import os
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from urllib.parse import urlsplit

import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.context import RequestContext, context_of, find_work_endpoint
from app.headers import read_preference
from smart_embedder import __version__

log = structlog.get_logger(__name__)

_PATH = "/v1/traces"
_EXPORT_SECONDS = 2
_COUNTS = {"sentences", "passages", "tokens"}
_NANOSECONDS = 1_000_000_000

_W3C = TraceContextTextMapPropagator()


class TraceRequests:
    """Continues the client's W3C trace context, or begins one, and returns it in the response.

    A span holds route, status, request id, counts and times; never texts, vectors or tokens.
    OpenTelemetry's ASGI instrumentation would also record headers, and messages of exceptions,
    which may quote texts. Health checks and scrapes are not traced.
    """

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self.app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request inside its span."""
        endpoint = find_work_endpoint(scope)
        if endpoint is None:
            await self.app(scope, receive, send)
            return
        headers, context = Headers(scope=scope), context_of(scope)
        parent = _W3C.extract({name: read_preference(headers, name) for name in _W3C.fields})
        attributes = {
            "http.request.method": "POST",
            "http.route": endpoint.path,
            "smart_embedder.request_id": context.request_id,
        }
        name = f"POST {endpoint.path}"
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, attributes)
        # Stays empty if OTEL_SDK_DISABLED is set.
        returned: dict[str, str] = {}
        _W3C.inject(returned, set_span_in_context(span))

        async def send_with_traceparent(message: Message) -> None:
            if message["type"] == "http.response.start" and returned:
                MutableHeaders(scope=message)["traceparent"] = returned["traceparent"]
            await send(message)

        try:
            await self.app(scope, receive, send_with_traceparent)
        finally:
            self._end(span, context)

    def _end(self, span: Span, context: RequestContext) -> None:
        """Add a child span for each stage from its recorded times, and end the span."""
        # The time of day at which perf_counter was 0.
        clock = time.time_ns() - time.perf_counter_ns()
        for stage in context.stages:
            began = clock + int(stage.began * _NANOSECONDS)
            child = self._tracer.start_span(stage.name, set_span_in_context(span), start_time=began)
            if stage.model is not None:
                child.set_attribute("smart_embedder.model", stage.model)
            if stage.device_seconds is not None:
                child.set_attribute("smart_embedder.device_s", stage.device_seconds)
            child.end(clock + int(stage.ended * _NANOSECONDS))
        status = context.status or HTTPStatus.INTERNAL_SERVER_ERROR
        span.set_attribute("http.response.status_code", status)
        counts = _COUNTS & context.counts.keys()
        span.set_attributes({f"smart_embedder.{name}": context.counts[name] for name in counts})
        if (context.error_status or status) >= HTTPStatus.INTERNAL_SERVER_ERROR:
            span.set_status(StatusCode.ERROR, context.error_code or "internal_error")
        span.end()


class Traces:
    """Sends the spans of all requests, unless the client's trace context is unsampled."""

    def __init__(self, endpoint: str) -> None:
        service_name = os.environ.get("OTEL_SERVICE_NAME") or "smart-embedder"
        self._exporter = Exporter(endpoint)
        self._provider = TracerProvider(
            sampler=ParentBased(ALWAYS_ON),
            resource=Resource.create({SERVICE_NAME: service_name, SERVICE_VERSION: __version__}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(self._exporter, max_queue_size=8192, schedule_delay_millis=1000)
        )
        self.tracer = self._provider.get_tracer("app", __version__)

    def close(self) -> None:
        """Send the remaining spans; blocks for a few seconds at most."""
        timer = threading.Timer(_EXPORT_SECONDS, self._exporter.shutdown)
        timer.start()
        self._provider.shutdown()
        timer.cancel()


class Exporter(OTLPSpanExporter):
    """Logs one line when spans are lost, and one when they are delivered again.

    Spans that cannot be delivered are dropped, so that traces never delay a request.
    """

    def __init__(self, endpoint: str) -> None:
        # Its logger would log each failed attempt with the path, which may hold a key.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        url, parts = endpoint.rstrip("/"), urlsplit(endpoint)
        super().__init__(url.removesuffix(_PATH) + _PATH, timeout=_EXPORT_SECONDS)
        self._receiver = f"{parts.scheme}://{parts.netloc}"
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send one batch."""
        result = super().export(spans)
        failed = result is not SpanExportResult.SUCCESS
        if failed and not self._failing:
            log.warning("traces_not_delivered", receiver=self._receiver)
        elif self._failing and not failed:
            log.info("traces_delivered_again", receiver=self._receiver)
        self._failing = failed
        return result
