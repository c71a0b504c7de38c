"""Create the context of each request, and log each request at its end.

Neither middleware refuses a request; `ProvideContext` normalises its path and removes cookies.
"""

import re
import time
import uuid
from collections.abc import Callable, Sequence
from http import HTTPStatus

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.client_address import (
    Network,
    client_address,
    client_key,
    client_key_of_peer,
    forwarded_prefix,
    unmap_network,
)
from app.context import PathFacts, RequestContext, context_of
from app.error_responses import internal_error_response
from app.http_metrics import EMBEDDING_ENDPOINT
from app.logs import escape_text

_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_SLASHES = re.compile("//+")
log = structlog.get_logger(__name__)


class ProvideContext:
    """Creates the `RequestContext`, and adds X-Request-ID and Vector-Space to the response.

    The request id is the client's own if it sent a printable one. Only `trusted_proxies` may set
    the client's address, through X-Forwarded-For, and the prefix of the service's paths, through
    X-Forwarded-Prefix; an ASGI server may also set the prefix, as `root_path`. The query string
    moves to the context; cookies are dropped.
    """

    def __init__(
        self, app: ASGIApp, trusted_proxies: Sequence[Network], facts_of: Callable[[str], PathFacts]
    ) -> None:
        self.app = app
        self._facts_of = facts_of
        self._trusted_proxies = [unmap_network(network) for network in trusted_proxies]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Create the context of an HTTP request and pass the request on."""
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
                headers = MutableHeaders(scope=message)
                headers["X-Request-ID"] = context.request_id
                if context.vector_spaces and context.status == HTTPStatus.OK:
                    headers["Vector-Space"] = ", ".join(context.vector_spaces.values())
            else:
                context.bytes_out += len(message.get("body", b""))
            await send(message)

        await self.app(scope, record_receive, record_send)

    def _create_context(self, scope: Scope) -> RequestContext:
        headers = Headers(scope=scope)
        sent_id = headers.get("x-request-id", "")
        peer, _ = scope["client"] or ("", 0)
        forwarded_for = ",".join(headers.getlist("x-forwarded-for"))
        # ASGI servers put root_path before the path.
        root_path = scope.get("root_path", "").rstrip("/")
        path = scope["path"].removeprefix(root_path) or "/"
        if not path.startswith("/"):
            path = scope["path"]
        forwarded = headers.get("x-forwarded-prefix", "")
        prefix = root_path or forwarded_prefix(peer, forwarded, self._trusted_proxies)
        # The router's patterns ignore a slash and a line feed (%0A) at the end. Middleware that
        # compares paths must, too, so that no request bypasses it. Clients whose base address ends
        # with a slash send two.
        bare = _SLASHES.sub("/", path).rstrip("/\n")
        normalized = EMBEDDING_ENDPOINT if f"{bare}/" == EMBEDDING_ENDPOINT else bare or "/"
        scope["root_path"], scope["path"] = prefix, prefix + normalized
        facts = self._facts_of(normalized)
        # FastAPI would parse both for every endpoint. 64 KiB of query take 20 ms, and 64 KiB of
        # backslashes in a cookie six seconds, because that time is quadratic.
        query, scope["query_string"] = scope.get("query_string", b""), b""
        scope["headers"] = [header for header in scope["headers"] if header[0] != b"cookie"]
        return RequestContext(
            request_id=sent_id if _REQUEST_ID.fullmatch(sent_id) else uuid.uuid4().hex,
            path=escape_text(path),
            endpoint=facts.endpoint if scope["method"] == "POST" else None,
            dialects=facts.dialects,
            is_public=facts.is_public,
            client_address=client_key(client_address(peer, forwarded_for, self._trusted_proxies))
            if forwarded_for
            else client_key_of_peer(peer),
            route=normalized,
            prefix=prefix,
            query=query,
            if_vector_space=", ".join(headers.getlist("if-vector-space")),
        )


class LogRequests:
    """Logs one line at the end of each request.

    The line holds status, method, route and milliseconds; the name of the client's token, its
    address (for IPv6 its /64), the path and sizes; and for embedding and reranking the counts and
    the duration of each stage. Unknown values are left out. Texts, tokens and query strings are
    never logged.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request, and log its outcome."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        context = context_of(scope)
        started = time.perf_counter()
        try:
            await self.app(scope, receive, send)
        except Exception as error:  # Last resort, so that the client gets a response.
            log.exception("request_failed", request_id=context.request_id)
            if context.status is None:
                await internal_error_response(scope, error)(scope, receive, send)
        finally:
            is_client_error = 400 <= (context.status or 0) < 500  # noqa: PLR2004 - a 4xx
            # Health checks and scrapes.
            is_routine = scope["method"] in {"GET", "HEAD"} and not is_client_error
            write = log.debug if is_routine else log.info
            facts = {
                "status": context.status,
                "method": scope["method"],
                "route": getattr(scope.get("route"), "path", None),
                "ms": round((time.perf_counter() - started) * 1000, 3),
                "code": context.error_code,
                "client": context.token_name,
                "client_address": context.client_address,
                "path": context.path,
                "bytes_in": context.bytes_in,
                "bytes_out": context.bytes_out,
                **context.counts,
                "request_id": context.request_id,
            }
            write("request", **{name: fact for name, fact in facts.items() if fact is not None})
