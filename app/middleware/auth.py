"""Who may ask: pages of allowed origins, before the drain, with a token, within the rate limit.

The order is that of the checks, each of which refuses a request before its body is read. Tokens and
buckets are `smart_embedder.access`; what is asked for is of no concern here.
"""

import math
from collections.abc import Collection, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.context import COUNTERS, RequestContext, context_of, working_endpoint
from app.error_responses import error_response
from app.errors import ForeignOriginError, RateLimitedError, UnauthorizedError
from app.logs import escape_text
from app.middleware.rate_limit import TokenBuckets
from app.middleware.tokens import DEFAULT_NAME, ApiTokens
from app.server import Drain
from smart_embedder import errors

ANY_ORIGIN = "*"
_EXPOSED = ("X-Request-ID", "Retry-After", "Vector-Space", "traceparent")
_DEFAULT_PORTS = {"http": 80, "https": 443}
_PUBLIC = ("/health", "/ui", "/docs", "/redoc", "/openapi.json", "/static/docs")
_HOW = "send Authorization: Bearer <token>, with a token of API_TOKEN or API_TOKENS_FILE"
_RETRY_AFTER = 5


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


class RefuseWhileDraining:
    """Answers 503 to requests for work once the drain has begun; health and metrics go on.

    Every response that begins from then on announces that its connection closes.
    """

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self.app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or track it to its end."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start" and self._drain.begun:
                MutableHeaders(scope=message)["Connection"] = "close"
            await send(message)

        if working_endpoint(scope) is None:
            await self.app(scope, receive, send_last)
        elif self._drain.begun:
            error = errors.DrainingError("the service is shutting down", retry_after=_RETRY_AFTER)
            await error_response(scope, error)(scope, receive, send_last)
        else:
            with self._drain.track():
                await self.app(scope, receive, send_last)


class RequireTokenAndLimitRate:
    """Answers 401 without a known token, and 429 to a client that has exceeded its rate limit.

    A request for work counts for its client: the name of its token, or its address.

    A request whose token failed counts for its address, on every path, in two buckets: that of work
    without a named token, and one of failures alone. Once that address has no tries left it is
    answered 429, and from then on a correct token gets another answer than a wrong one only for
    requests that are counted by its name. So guessing locks out no other client.
    """

    def __init__(
        self,
        app: ASGIApp,
        tokens: ApiTokens,
        buckets: TokenBuckets,
        *,
        requests_per_minute: int,
        burst: int,
        protect_metrics: bool,
    ) -> None:
        self.app = app
        self._tokens = tokens
        self._buckets = buckets
        self._protected = COUNTERS if protect_metrics else ()
        self._allowed = (
            f"{burst} requests at once and {requests_per_minute} a minute are allowed "
            "(RATE_LIMIT_BURST_SIZE, RATE_LIMIT_REQUESTS_PER_MINUTE)"
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request pass, or refuse it before its body is read."""
        if scope["type"] == "http":
            context, wait = context_of(scope), 0.0
            error: errors.SmartEmbedderError | None = None
            failures = f"failures:{context.client_address}"
            is_public = not self._tokens.required or self._is_public(context)
            if not is_public:
                token, fault = _authorization(scope)
                context.token_name = self._tokens.name_of(token)
                if context.token_name is None:
                    error = UnauthorizedError(f"{fault}: {_HOW}")
            if error is not None:
                wait = self._buckets.take(context.client)
                wait = max(wait, self._buckets.take(failures))
            elif context.endpoint is not None:
                wait = self._buckets.take(context.client)
            elif not is_public and (
                context.token_name == DEFAULT_NAME or not _is_below(context.route, COUNTERS)
            ):
                # The answer would only tell a guessing client that the token is correct.
                wait = self._buckets.peek(failures)
            if wait:
                seconds = math.ceil(wait)
                error = RateLimitedError(
                    f"too many requests: {self._allowed}; try again in {seconds} s",
                    retry_after=seconds,
                )
            if error is not None:
                await error_response(scope, error)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _is_public(self, context: RequestContext) -> bool:
        """Whether the request needs no token; a request for work always needs one."""
        path = context.route
        public = context.is_public or _is_below(path, _PUBLIC)
        return public and context.endpoint is None and not _is_below(path, self._protected)


def _is_below(path: str, parents: Sequence[str]) -> bool:
    return any(path == parent or path.startswith(f"{parent}/") for parent in parents)


def _authorization(scope: Scope) -> tuple[bytes, str]:
    """The token that was sent, empty if there is none, and what to say if it is not known.

    It stands after `Bearer`, in upper or lower case, or alone, as some clients send it.
    """
    # Bytes: str.strip would remove more than white space.
    header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    scheme, _, token = header.strip().partition(b" ")
    if not scheme:
        return b"", "no token was sent"
    if scheme.lower() != b"bearer":
        return header, "the Authorization header holds no bearer token"
    if not token.strip():
        return b"", "the Authorization header holds no bearer token"
    return token, "the token that was sent is not known"
