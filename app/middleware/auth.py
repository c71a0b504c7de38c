"""Asks for a bearer token on everything that is not public."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.errors import error_response
from app.errors import UnauthorizedError
from app.middleware.rate_limit import RateLimit
from app.tokens import Tokens

_PUBLIC = ("/health", "/docs", "/redoc", "/openapi.json", "/static/docs")
_PUBLIC_UNLESS_PROTECTED = ("/stats", "/metrics")


class RequireToken:
    """Answers 401 without a known token; notes whose token it was for limits and logs.

    A refused request counts against its address's rate limit, and is 429 where that is used up.
    """

    def __init__(
        self, app: ASGIApp, tokens: Tokens, limit: RateLimit, *, protect_metrics: bool
    ) -> None:
        self.app = app
        self._tokens = tokens
        self._limit = limit
        self._public = _PUBLIC if protect_metrics else _PUBLIC + _PUBLIC_UNLESS_PROTECTED

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request pass, or refuse it before its body is read."""
        if scope["type"] != "http" or not self._tokens.required or self._is_public(scope):
            await self.app(scope, receive, send)
            return
        name = self._tokens.name_of(_bearer_token(scope))
        if name is None:
            error = await self._limit.refusal(scope) or UnauthorizedError(
                "a valid token is needed: Authorization: Bearer <token>"
            )
            await error_response(scope, error)(scope, receive, send)
            return
        scope["state"]["token_name"] = name
        await self.app(scope, receive, send)

    def _is_public(self, scope: Scope) -> bool:
        path: str = scope["path"]
        return any(path == public or path.startswith(f"{public}/") for public in self._public)


def _bearer_token(scope: Scope) -> bytes:
    scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
    return token.strip().encode("latin-1") if scheme.lower() == "bearer" else b""
