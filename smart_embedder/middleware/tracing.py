"""Traces of requests, sent to an OTLP receiver over HTTP; imported only if OTLP_ENDPOINT is set."""

import logging
import math
import time
from collections.abc import Sequence
from http import HTTPStatus
from urllib.parse import urlsplit

import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from smart_embedder import __version__
from smart_embedder.api.context import RequestContext, context_of, preference, working_endpoint

log = structlog.get_logger(__name__)

_W3C_HEADERS = ("traceparent", "tracestate")
_COUNTS = {"sentences", "passages", "tokens"}
_PATH = "/v1/traces"
_NANOSECONDS = 1_000_000_000
_BATCH_TIMEOUT_SECONDS = 2
_BATCH_INTERVAL_MS = 1000
_MAX_QUEUED_SPANS = 8192
_MAX_BATCH_SPANS = 512

_W3C = TraceContextTextMapPropagator()


class TraceRequests:
    """Continues the client's W3C trace context, or begins one, and returns it in the response.

    A span holds route, status, request id, counts and times; never a text, a vector or a token.
    Health checks and scrapes are not traced.
    """

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self.app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request inside its span."""
        endpoint = working_endpoint(scope)
        if endpoint is None:
            await self.app(scope, receive, send)
            return
        headers, context = Headers(scope=scope), context_of(scope)
        sent = {name: preference(headers, name) for name in _W3C_HEADERS}
        parent = _W3C.extract({name: value for name, value in sent.items() if value})
        span = self._tracer.start_span(f"POST {endpoint.path}", parent, SpanKind.SERVER)
        # Empty where OTEL_SDK_DISABLED is set.
        returned: dict[str, str] = {}
        _W3C.inject(returned, set_span_in_context(span))

        async def send_with_traceparent(message: Message) -> None:
            if message["type"] == "http.response.start" and returned:
                MutableHeaders(scope=message)["traceparent"] = returned["traceparent"]
            await send(message)

        try:
            await self.app(scope, receive, send_with_traceparent)
        finally:
            self._end(span, context, endpoint.path)

    def _end(self, span: Span, context: RequestContext, route: str) -> None:
        """End the span now, with a child for each stage, made from its recorded times."""
        # The time of day at which perf_counter was 0.
        clock = time.time_ns() - int(time.perf_counter() * _NANOSECONDS)
        parent = set_span_in_context(span)
        for stage in context.stages:
            begin = clock + int(stage.began * _NANOSECONDS)
            child = self._tracer.start_span(stage.name, parent, start_time=begin)
            facts = {"model": stage.model, "device_s": stage.device_seconds}
            for name, value in facts.items():
                if value is not None:
                    child.set_attribute(f"smart_embedder.{name}", value)
            child.end(clock + int(stage.ended * _NANOSECONDS))
        status = context.status or HTTPStatus.INTERNAL_SERVER_ERROR
        counts = {name: context.counts[name] for name in _COUNTS & context.counts.keys()}
        own = {"request_id": context.request_id} | counts
        span.set_attributes(
            {f"smart_embedder.{name}": value for name, value in own.items()}
            | {"http.request.method": "POST", "http.route": route}
            | {"http.response.status_code": status}
        )
        if (context.error_status or status) >= HTTPStatus.INTERNAL_SERVER_ERROR:
            span.set_status(Status(StatusCode.ERROR, context.error_code or "internal_error"))
        span.end()


class Traces:
    """Sends the spans of every request that the client's trace context does not leave unsampled."""

    def __init__(self, endpoint: str, service_name: str) -> None:
        # They log every failed try; `QuietExporter` logs the first.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        url, parts = endpoint.rstrip("/"), urlsplit(endpoint)
        self._exporter = QuietExporter(
            OTLPSpanExporter(url.removesuffix(_PATH) + _PATH, timeout=_BATCH_TIMEOUT_SECONDS),
            f"{parts.scheme}://{parts.netloc}",  # The path may hold a key.
        )
        processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=_MAX_QUEUED_SPANS,
            max_export_batch_size=_MAX_BATCH_SPANS,
            schedule_delay_millis=_BATCH_INTERVAL_MS,
        )
        self._provider = TracerProvider(
            sampler=ParentBased(ALWAYS_ON),
            resource=Resource.create({SERVICE_NAME: service_name, SERVICE_VERSION: __version__}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(processor)
        self.tracer = self._provider.get_tracer("app", __version__)

    def close(self) -> None:
        """Send the remaining spans, for a few seconds at most; blocks."""
        self._exporter.limit_time()
        self._provider.shutdown()


class QuietExporter(SpanExporter):
    """Logs once that spans are lost, and once that they are delivered again.

    What cannot be delivered is dropped: traces must not delay a request.
    """

    def __init__(self, exporter: SpanExporter, receiver: str) -> None:
        self._exporter = exporter
        self._receiver = receiver
        self._failing = False
        self._give_up_at = math.inf

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send one batch."""
        if time.monotonic() > self._give_up_at:
            return SpanExportResult.FAILURE
        result = self._exporter.export(spans)
        failed = result is not SpanExportResult.SUCCESS
        if failed and not self._failing:
            log.warning("traces_not_delivered", receiver=self._receiver)
        elif self._failing and not failed:
            log.info("traces_delivered_again", receiver=self._receiver)
        self._failing = failed
        if failed and self._give_up_at < math.inf:
            self._give_up_at = 0.0
        return result

    def limit_time(self) -> None:
        """Stop at the next failure, or after a few seconds; called before the process ends."""
        self._give_up_at = 0.0 if self._failing else time.monotonic() + _BATCH_TIMEOUT_SECONDS

    def shutdown(self) -> None:
        """End the connections."""
        self._exporter.shutdown()
