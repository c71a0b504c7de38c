"""One log line for each request, and an error response for exceptions that nothing else handles."""

import time

import structlog
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.context import RequestContext, context_of
from app.api.errors import unforeseen_error_response

log = structlog.get_logger(__name__)


class LogRequests:
    """Logs the end of each request.

    The line holds method, path, route, status, sizes and, where work was done, how much and how
    long each stage took, the name of the client's token and its address (of IPv6 the /64); never
    texts, tokens or query strings.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request, and log how it ended."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        context = context_of(scope)
        started = time.perf_counter()
        try:
            await self.app(scope, receive, send)
        except Exception as error:  # The last resort: the client must get a response.
            log.exception("request_failed", request_id=context.request_id)
            if context.status is None:
                await unforeseen_error_response(scope, error)(scope, receive, send)
        finally:
            _log_end(scope, context, time.perf_counter() - started)


def _log_end(scope: Scope, context: RequestContext, seconds: float) -> None:
    write = log.debug if _is_routine(scope["method"], context.status) else log.info
    write(
        "request",
        request_id=context.request_id,
        method=scope["method"],
        path=context.path,
        route=getattr(scope.get("route"), "path", None),
        client=context.token_name,
        client_address=context.client_address,
        status=context.status,
        code=context.error_code,
        bytes_in=context.bytes_in,
        bytes_out=context.bytes_out,
        ms=round(seconds * 1000, 3),
        **context.counts,
    )


def _is_routine(method: str, status: int | None) -> bool:
    """Whether this is a health check or a scrape, unless its sender made a mistake."""
    client_error = status is not None and 400 <= status < 500  # noqa: PLR2004 - a 4xx
    return method in {"GET", "HEAD"} and not client_error
