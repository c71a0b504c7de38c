"""Refuse requests from web pages of other origins."""

import re
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from app.error_responses import error_response
from app.errors import ForeignOriginError
from app.logs import escape_text

ANY_ORIGIN = "*"
_EXPOSED = ("X-Request-ID", "Retry-After", "RateLimit", "Vector-Space", "traceparent")
_DEFAULT_PORTS = {"http": 80, "https": 443}


class CheckOrigin:
    """Answers 403 to web pages, except this service's own and those that CORS_ORIGINS names.

    A page in a browser on this machine can send requests to the machine's loopback address and into
    networks that the page's author cannot reach.

    Browsers send the page's origin, which the page cannot change; other clients send none and pass.
    The origin `null` is foreign. In CORS_ORIGINS, `scheme://` stands for all origins with this
    scheme. Starlette's `CORSMiddleware` adds the CORS headers; here it refuses nothing.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        self._allowed = allowed
        self._schemes = tuple(origin for origin in allowed if origin.endswith("://"))
        self.app = app
        if allowed:
            self.app = CORSMiddleware(
                app,
                allow_origins=allowed,
                allow_origin_regex="|".join(
                    f"{scheme}.+" for scheme in map(re.escape, self._schemes)
                ),
                allow_methods=["*"],
                allow_headers=["*"],
                allow_private_network=True,
                expose_headers=_EXPOSED,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it before its body is read."""
        if scope["type"] == "http" and ANY_ORIGIN not in self._allowed:
            headers = Headers(scope=scope)
            # Browsers send one header; several, joined, match no allowed origin.
            origin = ", ".join(headers.getlist("origin"))
            if (
                origin
                and origin not in self._allowed
                and not origin.startswith(self._schemes)
                and headers.get("sec-fetch-site") != "same-origin"
                and not _is_same_origin(origin, headers.get("host", ""))
            ):
                error = ForeignOriginError(
                    f"a web page of {escape_text(origin)} may not call this service: CORS_ORIGINS "
                    "does not name its origin"
                )
                await error_response(scope, error)(scope, receive, send)
                return
        await self.app(scope, receive, send)


def _is_same_origin(origin: str, host: str) -> bool:
    """Whether the page of `origin` was served from `host`, the request's Host header.

    Schemes are not compared: behind a proxy that ends TLS, the page has https and the request http.
    """
    try:
        page = urlsplit(origin)
        service = urlsplit(f"//{host}")
        default = _DEFAULT_PORTS.get(page.scheme)
        ports = page.port or default, service.port or default
    except ValueError:
        return False
    return page.hostname is not None and page.hostname == service.hostname and ports[0] == ports[1]
