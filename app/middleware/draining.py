"""Refuse new work while the service shuts down."""

import time
from collections.abc import Callable

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.context import find_work_endpoint
from app.error_responses import error_response
from smart_embedder import errors
from smart_embedder.core import ActiveRequests

_RETRY_AFTER = 5


class Drain(ActiveRequests):
    """A graceful shutdown, which also counts the requests in progress.

    At a signal `announced` is set, and /health answers 503, so that load balancers send no more
    requests. After SHUTDOWN_DELAY `begun` is set, and new requests are refused. `time_out`, which
    the app sets, fails the requests that are still in progress.
    """

    def __init__(self) -> None:
        super().__init__()
        self.announced = self.begun = False
        self.time_out: Callable[[], None] = lambda: None
        self._begun_at = 0.0

    def begin(self) -> None:
        """Refuse new requests from now on; safe to call from a signal handler."""
        if not self.begun:
            self._begun_at = time.monotonic()
        self.announced = self.begun = True

    def seconds_left(self, limit: float) -> float:
        """Return how many of the `limit` seconds since `begin` are left; not below 0."""
        elapsed = time.monotonic() - self._begun_at if self.begun else 0.0
        return max(0.0, limit - elapsed)


class RefuseWhileDraining:
    """Answers 503 to requests for work once the drain has begun; health and metrics still answer.

    From then on every response has `Connection: close`.
    """

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self.app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or track it until it ends."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start" and self._drain.begun:
                MutableHeaders(scope=message)["Connection"] = "close"
            await send(message)

        if find_work_endpoint(scope) is None:
            await self.app(scope, receive, send_last)
        elif self._drain.begun:
            error = errors.DrainingError("the service is shutting down", retry_after=_RETRY_AFTER)
            await error_response(scope, error)(scope, receive, send_last)
        else:
            with self._drain.track():
                await self.app(scope, receive, send_last)
