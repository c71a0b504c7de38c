"""One trace for each request that asks for work; stands only where OTLP_ENDPOINT is set."""

from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.middleware.endpoints import working_endpoint
from app.observability.tracing import Attributes, RequestSpan, Tracer

_W3C_HEADERS = ("traceparent", "tracestate")
_COUNTS = ("sentences", "passages", "tokens")


class TraceRequests:
    """Continues the client's W3C trace context, or begins one, and names it in the answer.

    A span tells route, status, request id, counts and times; never a text, a vector or a token.
    Health checks and scrapes are not traced.
    """

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self.app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request inside its span."""
        route = working_endpoint(scope)
        if route is None:
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        context = {name: headers[name] for name in _W3C_HEADERS if name in headers}
        span = self._tracer.begin(f"POST {route}", context)
        status: int = HTTPStatus.INTERNAL_SERVER_ERROR

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if span.traceparent is not None:
                    MutableHeaders(scope=message)["traceparent"] = span.traceparent
            await send(message)

        try:
            await self.app(scope, receive, watch)
        finally:
            _end(span, scope, route, status)


def _end(span: RequestSpan, scope: Scope, route: str, status: int) -> None:
    state = scope["state"]
    code = state.get("error_code")
    attributes: Attributes = {
        "http.request.method": "POST",
        "http.route": route,
        "http.response.status_code": status,
        "smart_embedder.request_id": state["request_id"],
        **_counts(state.get("work", {})),
    }
    failed = status >= HTTPStatus.INTERNAL_SERVER_ERROR
    span.end(attributes, state.get("stages", ()), code or "internal_error" if failed else None)


def _counts(work: dict[str, int | float]) -> Attributes:
    return {f"smart_embedder.{name}": work[name] for name in _COUNTS if name in work}
