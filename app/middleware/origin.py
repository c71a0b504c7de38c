"""Refuses the requests of other sites' web pages, except those that CORS_ORIGINS names.

A page that is open in a browser on this machine can send requests to its loopback port, and into a
network that the page's author cannot reach.
"""

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.errors import error_response
from app.errors import ForeignOriginError
from app.observability.logs import escape_text

ANY_ORIGIN = "*"
_DEFAULT_PORTS = {"http": 80, "https": 443}
_EXPOSED = ("X-Request-ID", "Retry-After", "traceparent")


class CheckOrigin:
    """Answers 403 to a page that neither this service served nor CORS_ORIGINS allows.

    Browsers send a page's origin, which the page cannot change; other clients send none and pass.
    `null`, which a page without an origin sends, is foreign. Starlette's `CORSMiddleware` adds the
    headers for browsers; its own refusals cannot occur behind this check.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        self._allowed = allowed
        self.app = app if not allowed else _with_cors_headers(app, allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request pass, or refuse it before its body is read."""
        if scope["type"] == "http":
            foreign = self._foreign_origin(Headers(scope=scope))
            if foreign is not None:
                await error_response(scope, _error(foreign))(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _foreign_origin(self, headers: Headers) -> str | None:
        """The origin, if it is not allowed; a browser sends one, and several together are none."""
        if ANY_ORIGIN in self._allowed or headers.get("sec-fetch-site") == "same-origin":
            return None
        origin = ", ".join(headers.getlist("origin"))
        if not origin or origin in self._allowed or _is_own(origin, headers.get("host", "")):
            return None
        return origin


def _is_own(origin: str, host: str) -> bool:
    """Whether a page of `origin` came from `host`, the request's Host header.

    The scheme is not compared: behind a proxy that ends TLS the page has https, the request http.
    """
    try:
        page = urlsplit(origin)
        own = urlsplit(f"//{host}")
        default = _DEFAULT_PORTS.get(page.scheme)
        ports = page.port or default, own.port or default
    except ValueError:
        return False
    return page.hostname is not None and page.hostname == own.hostname and ports[0] == ports[1]


def _with_cors_headers(app: ASGIApp, allowed: Collection[str]) -> CORSMiddleware:
    return CORSMiddleware(
        app,
        allow_origins=allowed,
        allow_methods=["*"],
        allow_headers=["*"],
        allow_private_network=True,
        expose_headers=_EXPOSED,
    )


def _error(origin: str) -> ForeignOriginError:
    return ForeignOriginError(
        f"a web page of {escape_text(origin)} may not ask: CORS_ORIGINS does not name its origin"
    )
