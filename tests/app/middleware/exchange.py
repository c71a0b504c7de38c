"""Send one request through a middleware, in process."""

from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp

from app.middleware.request_log import ProvideContext
from tests.support.paths import PATHS

Headers = Sequence[tuple[bytes, bytes]]


class Inner:
    """An app that reads the body and answers 200; it keeps the scope and the body."""

    def __init__(self) -> None:
        self.scope: Any = None
        self.body: bytes | None = None

    @property
    def called(self) -> bool:
        return self.scope is not None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scope, body, more = scope, b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.body = body
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})


def body_message(fields: dict[str, Any]) -> dict[str, Any]:
    """Build an http.request message without falsy fields, which ASGI servers may leave out."""
    return {"type": "http.request"} | {name: value for name, value in fields.items() if value}


async def exchange(
    app: ASGIApp,
    *body: bytes,
    method: str = "POST",
    path: str = "/embeddings/",
    headers: Headers = (),
    peer: str = "192.0.2.1",
    proxies: Sequence[Any] = (),
    **scope: Any,
) -> tuple[Any, list[dict[str, Any]]]:
    """Send a request; return its context and the messages of its response."""
    parts, sent = list(body or [b""]), list[dict[str, Any]]()

    async def receive() -> dict[str, Any]:
        return body_message({"body": parts.pop(0), "more_body": bool(parts)})

    async def send(message: Any) -> None:
        sent.append(message)

    scope |= {"type": "http", "method": method, "path": path, "headers": list(headers)}
    scope["client"] = (peer, 1)
    await ProvideContext(app, proxies, PATHS.find)(scope, receive, send)
    return scope["state"]["context"], sent


def header(sent: list[dict[str, Any]], name: bytes) -> bytes | None:
    """Return a header of the response."""
    return dict(sent[0]["headers"]).get(name)
