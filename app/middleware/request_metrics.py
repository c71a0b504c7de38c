"""Counts every request to the endpoints that do work, whichever layer answers it."""

import time
from http import HTTPStatus

from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.context import RequestContext, context_of, working_endpoint
from app.api.paths import ENDPOINTS
from app.engine.scheduling.job import Purpose
from app.errors import ClientGoneError
from app.observability.metrics import EndpointMetrics, Metrics

_REASON_OF = {
    "queue_full": "backpressure",
    "rate_limited": "rate_limit",
    "unauthorized": "auth",
    "body_too_large": "body_too_large",
    "loading": "loading",
    "model_not_loaded": "model",
    "model_too_large": "model",
    "draining": "draining",
    "unhealthy": "unhealthy",
    "reranker_disabled": "disabled",
    "foreign_origin": "origin",
}


class MeasureRequests:
    """Updates the request metrics: outcome, duration, and how many are in work."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self._abandoned = metrics.abandoned
        reranking = metrics.rerank_endpoint()
        self._endpoints = {
            endpoint.path: reranking
            if endpoint.purpose is Purpose.RERANKING
            else metrics.embedding_endpoint(endpoint.path)
            for endpoint in ENDPOINTS
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Measure POST requests to known endpoints; pass everything else through."""
        endpoint = working_endpoint(scope)
        if endpoint is None:
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        try:
            with self._endpoints[endpoint.path].active.track_inprogress():
                await self.app(scope, receive, send)
        finally:
            # If dialects share a path, the body has decided between them by now.
            endpoint = working_endpoint(scope) or endpoint
            seconds = time.perf_counter() - started
            self._count(self._endpoints[endpoint.path], context_of(scope), seconds)

    def _count(self, endpoint: EndpointMetrics, context: RequestContext, seconds: float) -> None:
        """Count a request once: as refused, as abandoned, or by its outcome."""
        code = context.error_code
        if code in _REASON_OF:
            endpoint.rejected[_REASON_OF[code]].inc()
        elif code == ClientGoneError.code:
            self._abandoned.inc()
        else:
            outcome = _outcome(context.error_status or context.status)
            endpoint.requests[outcome].inc()
            if outcome != "client_error":  # It measures how fast a request is refused.
                endpoint.duration.observe(seconds)


def _outcome(status: int | None) -> str:
    if status == HTTPStatus.OK:
        return "success"
    if status and HTTPStatus.BAD_REQUEST <= status < HTTPStatus.INTERNAL_SERVER_ERROR:
        return "client_error"
    return "timeout" if status == HTTPStatus.GATEWAY_TIMEOUT else "error"
