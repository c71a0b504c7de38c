"""Refuses the requests of a client that exceeds its rate limit."""

import math

from starlette.types import ASGIApp, Receive, Scope, Send

from app.access.rate_limit import Buckets
from app.api.context import RequestContext, context_of
from app.api.errors import error_response
from app.errors import RateLimitedError


class RateLimiter:
    """Decides in which bucket a request counts, and whether it may go on.

    After the token check only requests for work count, for their client. A request whose token
    failed counts for its address, on every path, in two buckets: that of work without a named
    token, and one of failures alone. So a client that guesses does not lock out a named token from
    the same address.
    """

    def __init__(self, buckets: Buckets, requests_per_minute: int, burst: int) -> None:
        self._buckets = buckets
        self._allowed = (
            f"{burst} requests at once and {requests_per_minute} a minute are allowed "
            "(RATE_LIMIT_BURST_SIZE, RATE_LIMIT_REQUESTS_PER_MINUTE)"
        )

    async def count(self, context: RequestContext) -> RateLimitedError | None:
        """Count a request if it asks for work; the error, if its client exceeds the limit."""
        if context.endpoint is None:
            return None
        return self._error(await self._buckets.take(context.client))

    async def count_failed_token(self, context: RequestContext) -> RateLimitedError | None:
        """Count a request whose token failed; the error, if its address has no tries left."""
        wait = await self._buckets.take(context.client)
        return self._error(max(wait, await self._buckets.take(_failures_key(context))))

    async def check_failed_tokens(self, context: RequestContext) -> RateLimitedError | None:
        """The error, if the address of this request has no tries left; counts nothing."""
        return self._error(await self._buckets.peek(_failures_key(context)))

    def _error(self, wait: float) -> RateLimitedError | None:
        if not wait:
            return None
        seconds = math.ceil(wait)
        return RateLimitedError(
            f"too many requests: {self._allowed}; try again in {seconds} s", retry_after=seconds
        )


def _failures_key(context: RequestContext) -> str:
    return f"failures:{context.client_address}"


class LimitRate:
    """Answers 429 before the body is read; runs after the token check, which sets the client."""

    def __init__(self, app: ASGIApp, limiter: RateLimiter) -> None:
        self.app = app
        self._limiter = limiter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request pass, or refuse it with a Retry-After."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        error = await self._limiter.count(context_of(scope))
        if error is not None:
            await error_response(scope, error)(scope, receive, send)
            return
        await self.app(scope, receive, send)
