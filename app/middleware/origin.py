"""Refuse requests that web pages of other origins make."""

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from app.error_responses import error_response
from app.errors import ForeignOriginError
from app.logs import escape_text

ANY_ORIGIN = "*"
_EXPOSED = ("X-Request-ID", "Retry-After", "Vector-Space", "traceparent")
_DEFAULT_PORTS = {"http": 80, "https": 443}


class CheckOrigin:
    """Answers 403 to a page that neither this service served nor CORS_ORIGINS allows.

    A page that is open in a browser on this machine can send requests to its loopback port, and
    into a network that the page's author cannot reach.

    Browsers send a page's origin, which the page cannot change; other clients send none and pass.
    `null`, which a page without an origin sends, is foreign. Starlette's `CORSMiddleware` adds the
    headers for browsers; its own refusals cannot occur behind this check.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        self._allowed = allowed
        self.app = app
        if allowed:
            self.app = CORSMiddleware(
                app,
                allow_origins=allowed,
                allow_methods=["*"],
                allow_headers=["*"],
                allow_private_network=True,
                expose_headers=_EXPOSED,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request pass, or refuse it before its body is read."""
        if scope["type"] == "http" and ANY_ORIGIN not in self._allowed:
            headers = Headers(scope=scope)
            # A browser sends one, and several together are none of the allowed.
            origin = ", ".join(headers.getlist("origin"))
            if (
                origin
                and origin not in self._allowed
                and headers.get("sec-fetch-site") != "same-origin"
                and not _is_own(origin, headers.get("host", ""))
            ):
                error = ForeignOriginError(
                    f"a web page of {escape_text(origin)} may not ask: CORS_ORIGINS does not name "
                    "its origin"
                )
                await error_response(scope, error)(scope, receive, send)
                return
        await self.app(scope, receive, send)


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
