"""The outermost layer: a request id, one log line, and an answer whatever happens inside."""

import re
import time
import uuid

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.errors import unforeseen_error_response
from app.observability.logs import escape_text

log = structlog.get_logger(__name__)

_REQUEST_ID = re.compile(r"[!-~]{1,128}")


class RequestContext:
    """Gives each request an id (the client's own if it sent a printable one) and logs its end.

    The line tells method, path, route, status, sizes and, where work was done, how much and how
    long each stage took. Neither texts nor tokens nor query strings reach the log.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request inside its context."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"] = _request_id(scope)
        body = _Body(receive)
        answer = _Answer(send, state["request_id"])
        path = escape_text(scope["path"])
        started = time.perf_counter()
        try:
            await self.app(scope, body.receive, answer.send)
        except Exception as error:  # The last resort: the client must get an answer.
            log.exception("request_failed", request_id=state["request_id"])
            if answer.status is None:
                await unforeseen_error_response(scope, error)(scope, receive, answer.send)
        finally:
            _log_end(scope, path, body, answer, time.perf_counter() - started)


class _Body:
    """Passes the body on and remembers how much of it came."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.size = 0

    async def receive(self) -> Message:
        message = await self._receive()
        self.size += len(message.get("body", b""))
        return message


class _Answer:
    """Passes the answer on, adds the request id, and remembers status and size."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id
        self.status: int | None = None
        self.size = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["X-Request-ID"] = self._request_id
        else:
            self.size += len(message.get("body", b""))
        await self._send(message)


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _log_end(scope: Scope, path: str, body: _Body, answer: _Answer, seconds: float) -> None:
    state = scope["state"]
    write = log.debug if _is_routine(scope["method"], answer.status) else log.info
    write(
        "request",
        request_id=state["request_id"],
        method=scope["method"],
        path=path,
        route=getattr(scope.get("route"), "path", None),
        client=state.get("token_name"),
        status=answer.status,
        code=state.get("error_code"),
        bytes_in=body.size,
        bytes_out=answer.size,
        ms=round(seconds * 1000, 3),
        **state.get("work", {}),
    )


def _is_routine(method: str, status: int | None) -> bool:
    """A health check or a scrape, whatever came of it, but no mistake of whoever sent it."""
    mistaken = status is not None and 400 <= status < 500  # noqa: PLR2004 - a 4xx
    return method in {"GET", "HEAD"} and not mistaken
