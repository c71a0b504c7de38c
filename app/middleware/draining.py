"""Refuses new work during a graceful shutdown, and tracks the work that was accepted."""

import asyncio
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.context import working_endpoint
from app.api.errors import error_response
from app.errors import DrainingError
from app.server.drain import Drain

_RETRY_AFTER = 5
_BODY_SECONDS = 2.0


class RefuseWhileDraining:
    """Answers 503 to requests for work once the drain has begun; health and metrics go on."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self.app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or track it to its end."""
        if working_endpoint(scope) is None:
            await self.app(scope, receive, send)
        elif self._drain.begun:
            await _read_body(scope, receive)
            error = DrainingError("the service is shutting down", retry_after=_RETRY_AFTER)
            await error_response(scope, error)(scope, receive, send)
        else:
            with self._drain.track():
                await self.app(scope, receive, send)


async def _read_body(scope: Scope, receive: Receive) -> None:
    """Read the body, for a limited time: many clients read no response before they have sent it."""
    if "expect" in Headers(scope=scope):
        return  # The client sends it only after 100 Continue.
    with suppress(TimeoutError):
        async with asyncio.timeout(_BODY_SECONDS):
            while (await receive()).get("more_body", False):
                pass
