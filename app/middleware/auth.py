"""Requires a bearer token on every path that is not public."""

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from app.access.api_tokens import DEFAULT_NAME, ApiTokens
from app.api.context import context_of, working_endpoint
from app.api.errors import error_response
from app.api.paths import is_health_check
from app.errors import SmartEmbedderError, UnauthorizedError
from app.middleware.rate_limit import RateLimiter

_PUBLIC = ("/health", "/ui", "/docs", "/redoc", "/openapi.json", "/static/docs")
_OPERATION = ("/stats", "/metrics")
_HOW = "send Authorization: Bearer <token>, with a token of API_TOKEN or API_TOKENS_FILE"


class RequireToken:
    """Answers 401 without a known token; records the token's name for limits and logs.

    Each failure counts for its address, for every path and method, and is answered 429 once that
    address has no tries left. From then on a correct token gets another answer than a wrong one
    only for requests that are counted by its name, so that guessing locks out no other client.
    """

    def __init__(
        self, app: ASGIApp, tokens: ApiTokens, limiter: RateLimiter, *, protect_metrics: bool
    ) -> None:
        self.app = app
        self._tokens = tokens
        self._limiter = limiter
        self._public = _PUBLIC if protect_metrics else _PUBLIC + _OPERATION

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request pass, or refuse it before its body is read."""
        if scope["type"] != "http" or not self._tokens.required or self._is_public(scope):
            await self.app(scope, receive, send)
            return
        error = await self._check(scope)
        if error is not None:
            await error_response(scope, error)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    async def _check(self, scope: Scope) -> SmartEmbedderError | None:
        """The error to answer, or None if the request may pass."""
        context = context_of(scope)
        presented = _authorization(scope)
        name = self._tokens.name_of(presented.token)
        if name is None:
            limited = await self._limiter.count_failed_token(context)
            return limited or UnauthorizedError(presented.fault)
        context.token_name = name
        if _only_confirms_token(scope, name):
            return await self._limiter.check_failed_tokens(context)
        return None

    def _is_public(self, scope: Scope) -> bool:
        """Whether the request needs no token; a request for work always needs one."""
        path = context_of(scope).route
        public = path == "/" or is_health_check(path) or _is_below(path, self._public)
        return public and working_endpoint(scope) is None


def _is_below(path: str, parents: Sequence[str]) -> bool:
    return any(path == parent or path.startswith(f"{parent}/") for parent in parents)


def _only_confirms_token(scope: Scope, name: str) -> bool:
    """Whether the answer would only tell a guessing client that the token is correct.

    False for requests for work, which the rate limit counts.
    """
    if working_endpoint(scope) is not None:
        return False
    return name == DEFAULT_NAME or not _is_below(context_of(scope).route, _OPERATION)


@dataclass(frozen=True, slots=True)
class _Authorization:
    """The token of a request, empty if there is none, and the message for an unknown one."""

    token: bytes
    fault: str


def _authorization(scope: Scope) -> _Authorization:
    """The token after `Bearer`, in upper or lower case, or alone, as some clients send it."""
    # Bytes: str.strip would remove more than white space.
    header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    scheme, _, token = header.strip().partition(b" ")
    if not scheme:
        return _Authorization(b"", f"no token was sent: {_HOW}")
    if scheme.lower() != b"bearer":
        return _Authorization(header, f"the Authorization header holds no bearer token: {_HOW}")
    if not token.strip():
        return _Authorization(b"", f"the Authorization header holds no bearer token: {_HOW}")
    return _Authorization(token, f"the token that was sent is not known: {_HOW}")
