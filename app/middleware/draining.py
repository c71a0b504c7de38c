"""Refuses new work while the service shuts down, and counts the work that it has let in."""

import asyncio
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.errors import error_response
from app.errors import DrainingError
from app.middleware.endpoints import working_endpoint
from app.server.drain import Drain

_RETRY_AFTER = 5
_BODY_SECONDS = 2.0


class RefuseWhileDraining:
    """Answers 503 to requests for work once the drain has begun; health and metrics stay."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self.app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or see it to its end."""
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
    """Take the body, for a while: many clients read no answer before they have sent it."""
    if "expect" in Headers(scope=scope):
        return  # The client waits for a word before it sends it.
    with suppress(TimeoutError):
        async with asyncio.timeout(_BODY_SECONDS):
            while (await receive()).get("more_body", False):
                pass
