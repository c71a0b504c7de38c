"""One trace for each request that asks for work; installed only if OTLP_ENDPOINT is set."""

from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.context import RequestContext, context_of, working_endpoint
from app.api.preferences import preference
from app.observability.tracing import Attributes, RequestSpan, Tracer

_W3C_HEADERS = ("traceparent", "tracestate")
_COUNTS = {"sentences", "passages", "tokens"}


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
        headers = Headers(scope=scope)
        sent = {name: preference(headers, name) for name in _W3C_HEADERS}
        context = {name: value for name, value in sent.items() if value}
        span = self._tracer.begin(f"POST {endpoint.path}", context)

        async def send_with_traceparent(message: Message) -> None:
            if message["type"] == "http.response.start" and span.traceparent is not None:
                MutableHeaders(scope=message)["traceparent"] = span.traceparent
            await send(message)

        try:
            await self.app(scope, receive, send_with_traceparent)
        finally:
            _end(span, context_of(scope), endpoint.path)


def _end(span: RequestSpan, context: RequestContext, route: str) -> None:
    status = context.status or HTTPStatus.INTERNAL_SERVER_ERROR
    attributes: Attributes = {
        "http.request.method": "POST",
        "http.route": route,
        "http.response.status_code": status,
        "smart_embedder.request_id": context.request_id,
        **{
            f"smart_embedder.{name}": context.counts[name]
            for name in _COUNTS & context.counts.keys()
        },
    }
    failed = (context.error_status or status) >= HTTPStatus.INTERNAL_SERVER_ERROR
    span.end(attributes, context.stages, context.error_code or "internal_error" if failed else None)
