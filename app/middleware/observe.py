"""Counts every request to the endpoints that do work, whatever refused or answered it."""

import time
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.metrics import EMBEDDING_ENDPOINT, Metrics

_REASON_OF = {
    "queue_full": "backpressure",
    "rate_limited": "rate_limit",
    "unauthorized": "auth",
    "body_too_large": "body_too_large",
    "loading": "loading",
    "draining": "draining",
    "unhealthy": "unhealthy",
}


class ObserveRequests:
    """Feeds the request metrics: outcome, duration, and how many are in work."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Observe POST requests to known endpoints; pass everything else through."""
        if scope["type"] != "http" or not _is_embedding(scope):
            await self.app(scope, receive, send)
            return
        status = 0

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        started = time.perf_counter()
        try:
            with self._metrics.embedding_active.track_inprogress():
                await self.app(scope, receive, watch)
        finally:
            self._count(status, scope, time.perf_counter() - started)

    def _count(self, status: int, scope: Scope, seconds: float) -> None:
        reason = _REASON_OF.get(scope.get("state", {}).get("error_code", ""))
        if reason is not None:
            self._metrics.embedding_rejected.labels(reason).inc()
            return
        self._metrics.embedding_requests.labels(_outcome(status), EMBEDDING_ENDPOINT).inc()
        self._metrics.embedding_duration.labels(EMBEDDING_ENDPOINT).observe(seconds)


def _is_embedding(scope: Scope) -> bool:
    path: str = scope["path"]
    return scope["method"] == "POST" and path.rstrip("/") == "/embeddings"


def _outcome(status: int) -> str:
    if status == HTTPStatus.OK:
        return "success"
    return "timeout" if status == HTTPStatus.GATEWAY_TIMEOUT else "error"
