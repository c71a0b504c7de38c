"""One log line for each request, and an error response for exceptions that nothing else handles."""

import time

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.context import context_of
from app.api.errors import unforeseen_error_response

log = structlog.get_logger(__name__)


class LogRequests:
    """Logs the end of each request.

    The line holds method, path, route, status, sizes and, where work was done, how much and how
    long each stage took; never texts, tokens or query strings.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request, and log how it ended."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = _RequestBody(receive)
        response = _Response(send)
        started = time.perf_counter()
        try:
            await self.app(scope, body.receive, response.send)
        except Exception as error:  # The last resort: the client must get a response.
            log.exception("request_failed", request_id=context_of(scope).request_id)
            if response.status is None:
                await unforeseen_error_response(scope, error)(scope, receive, response.send)
        finally:
            _log_end(scope, body, response, time.perf_counter() - started)


class _RequestBody:
    """Passes the body on and counts its bytes."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.size = 0

    async def receive(self) -> Message:
        message = await self._receive()
        self.size += len(message.get("body", b""))
        return message


class _Response:
    """Passes the response on and records its status and size."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status: int | None = None
        self.size = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.size += len(message.get("body", b""))
        await self._send(message)


def _log_end(scope: Scope, body: _RequestBody, response: _Response, seconds: float) -> None:
    context = context_of(scope)
    write = log.debug if _is_routine(scope["method"], response.status) else log.info
    write(
        "request",
        request_id=context.request_id,
        method=scope["method"],
        path=context.path,
        route=getattr(scope.get("route"), "path", None),
        client=context.token_name,
        status=response.status,
        code=context.error_code,
        bytes_in=body.size,
        bytes_out=response.size,
        ms=round(seconds * 1000, 3),
        **context.counts,
    )


def _is_routine(method: str, status: int | None) -> bool:
    """Whether this is a health check or a scrape, unless its sender made a mistake."""
    client_error = status is not None and 400 <= status < 500  # noqa: PLR2004 - a 4xx
    return method in {"GET", "HEAD"} and not client_error
