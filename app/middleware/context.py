"""The outermost middleware: creates a request's context, and records its status and sizes."""

import re
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.access.client_address import (
    Network,
    client_address,
    forwarded_prefix,
    network_key,
    unmapped,
)
from app.api.context import RequestContext
from app.api.paths import dialects_of, endpoint_of
from app.observability.labels import EMBEDDING_ENDPOINT
from app.observability.logs import escape_text

_REQUEST_ID = re.compile(r"[!-~]{1,128}")


class ProvideContext:
    """Creates the `RequestContext`, keeps it up to date, and adds X-Request-ID to the response.

    The id is the client's own if it sent a printable one. Only `trusted_proxies` may name another
    client's address, through X-Forwarded-For, and the path below which the service is, through
    X-Forwarded-Prefix. An ASGI server may name that path, too, as `root_path`. The query is left to
    the endpoint that reads one, and cookies to nobody.
    """

    def __init__(self, app: ASGIApp, trusted_proxies: Sequence[Network]) -> None:
        self.app = app
        self._trusted_proxies = [unmapped(network) for network in trusted_proxies]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Create the context of an HTTP request and go on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        context = self._create_context(scope)
        scope.setdefault("state", {})["context"] = context

        async def record_receive() -> Message:
            message = await receive()
            context.bytes_in += len(message.get("body", b""))
            return message

        async def record_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                MutableHeaders(scope=message)["X-Request-ID"] = context.request_id
            else:
                context.bytes_out += len(message.get("body", b""))
            await send(message)

        await self.app(scope, record_receive, record_send)

    def _create_context(self, scope: Scope) -> RequestContext:
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        peer, _ = scope["client"] or ("", 0)
        forwarded_for = ",".join(headers.getlist("x-forwarded-for"))
        root_path = scope.get("root_path", "").rstrip("/")
        path = _below(root_path, scope["path"])
        forwarded = headers.get("x-forwarded-prefix", "")
        prefix = root_path or forwarded_prefix(peer, forwarded, self._trusted_proxies)
        normalized = _normalize(path)
        scope["root_path"], scope["path"] = prefix, prefix + normalized
        # FastAPI would parse both for every endpoint: 64 KiB of a query in 20 ms, and of a cookie's
        # backslashes, whose time grows with the square of their number, in six seconds.
        query, scope["query_string"] = scope.get("query_string", b""), b""
        scope["headers"] = [each for each in scope["headers"] if each[0] != b"cookie"]
        return RequestContext(
            request_id=given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex,
            path=escape_text(path),
            endpoint=endpoint_of(normalized) if scope["method"] == "POST" else None,
            dialects=dialects_of(normalized),
            client_address=network_key(client_address(peer, forwarded_for, self._trusted_proxies)),
            route=normalized,
            prefix=prefix,
            query=query,
        )


def _below(root_path: str, path: str) -> str:
    """The path without `root_path`, which servers put before it."""
    below = path.removeprefix(root_path)
    return below if below.startswith("/") else path if below else "/"


def _normalize(path: str) -> str:
    """Remove slashes from the end of the path, where they change nothing.

    The router's patterns also match a line feed at the end (%0A). It is removed, too, so that no
    request bypasses middleware that compares paths.
    """
    bare = path.rstrip("/\n")
    return EMBEDDING_ENDPOINT if f"{bare}/" == EMBEDDING_ENDPOINT else bare or "/"
