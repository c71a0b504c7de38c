"""One request through middleware, in process."""

from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp

from app.middleware.request_log import ProvideContext
from tests.support.paths import PATHS

Headers = Sequence[tuple[bytes, bytes]]


class Inner:
    """The app inside: reads the body, and answers 200; keeps the scope and what it read."""

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


def part_of(fields: dict[str, Any]) -> dict[str, Any]:
    """A message of a body, without the fields that ASGI lets a server leave out."""
    return {"type": "http.request"} | {name: each for name, each in fields.items() if each}


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
    """The context of the request, and the messages of its answer."""
    left, sent = list(body or [b""]), list[dict[str, Any]]()

    async def receive() -> dict[str, Any]:
        return part_of({"body": left.pop(0), "more_body": bool(left)})

    async def send(message: Any) -> None:
        sent.append(message)

    whole = {"type": "http", "method": method, "path": path, "headers": list(headers)}
    whole |= {"client": (peer, 1), **scope}
    await ProvideContext(app, proxies, PATHS.find)(whole, receive, send)
    return whole["state"]["context"], sent


def header(sent: list[dict[str, Any]], name: bytes) -> bytes | None:
    """A header of an answer."""
    return dict(sent[0]["headers"]).get(name)
