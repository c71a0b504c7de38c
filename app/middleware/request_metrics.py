"""Count requests for work, and measure how long they take."""

import time
from collections.abc import Sequence
from http import HTTPStatus

from starlette.types import ASGIApp, Receive, Scope, Send

from app.context import Endpoint, RequestContext, context_of, find_work_endpoint
from app.errors import ClientGoneError
from app.http_metrics import REASON_OF, EndpointMetrics, Metrics
from smart_embedder.requests import Purpose


class MeasureRequests:
    """Updates the request metrics: outcomes, durations, and requests in progress."""

    def __init__(self, app: ASGIApp, metrics: Metrics, endpoints: Sequence[Endpoint]) -> None:
        self.app = app
        self._client = metrics.client
        self._abandoned = metrics.abandoned
        shared = {
            Purpose.RERANKING: metrics.rerank_endpoint(),
            Purpose.TOKENIZING: metrics.tokenize_endpoint(),
        }
        self._endpoints = {
            endpoint.path: shared.get(endpoint.purpose) or metrics.embedding_endpoint(endpoint.path)
            for endpoint in endpoints
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Measure requests for work; pass all others on."""
        endpoint = find_work_endpoint(scope)
        if endpoint is None:
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        try:
            with self._endpoints[endpoint.path].active.track_inprogress():
                await self.app(scope, receive, send)
        finally:
            # If dialects share the path, the body has selected the dialect by now.
            endpoint = find_work_endpoint(scope) or endpoint
            seconds = time.perf_counter() - started
            self._count(self._endpoints[endpoint.path], context_of(scope), seconds)

    def _count(self, endpoint: EndpointMetrics, context: RequestContext, seconds: float) -> None:
        """Count a request once: as rejected, as abandoned, or by its outcome."""
        code = context.error_code
        if context.token_name is not None:
            client = self._client(context.token_name)
            client.requests.inc()
            client.rejected.inc(code in REASON_OF)
            client.tokens.inc(context.counts.get("tokens", 0))
        if code in REASON_OF:
            endpoint.rejected[REASON_OF[code]].inc()
        elif code == ClientGoneError.code:
            self._abandoned.inc()
        else:
            outcome = _outcome(context.error_status or context.status)
            endpoint.requests[outcome].inc()
            # Durations of refused requests would distort the histogram.
            if outcome != "client_error":
                endpoint.duration.observe(seconds)


def _outcome(status: int | None) -> str:
    if status == HTTPStatus.OK:
        return "success"
    if status and HTTPStatus.BAD_REQUEST <= status < HTTPStatus.INTERNAL_SERVER_ERROR:
        return "client_error"
    return "timeout" if status == HTTPStatus.GATEWAY_TIMEOUT else "error"
