"""Refuses new work while the service shuts down, and counts the work that it has let in."""

from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.errors import error_response
from app.drain import Drain
from app.errors import DrainingError
from app.middleware.endpoints import working_endpoint

_RETRY_AFTER = 5


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
            error = DrainingError("the service is shutting down", retry_after=_RETRY_AFTER)
            await error_response(scope, error)(scope, receive, send)
        else:
            with self._drain.owing():
                await self.app(scope, receive, send)
