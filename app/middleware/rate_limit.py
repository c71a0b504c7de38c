"""Refuses the requests of a client that sends more than its share."""

import math

from starlette.types import ASGIApp, Receive, Scope, Send

from app.access.client_key import client_key
from app.access.rate_limit import Buckets
from app.api.errors import error_response
from app.errors import RateLimitedError
from app.middleware.endpoints import working_endpoint


class RateLimit:
    """The one rule: whom a request is counted for, and whether it may go on.

    Of what passes the token check only POST requests that ask for work count, each for its client.
    A request whose token failed counts for its address, whatever it asks for: in the bucket of the
    work without a named token, and in one of its own, which tells how much was guessed even where
    much is worked. A holder of a named token is not shut out by a guesser behind the same address.
    """

    def __init__(self, buckets: Buckets, requests_per_minute: int, burst: int) -> None:
        self._buckets = buckets
        self._allowed = (
            f"{burst} requests at once and {requests_per_minute} a minute are allowed "
            "(RATE_LIMIT_BURST_SIZE, RATE_LIMIT_REQUESTS_PER_MINUTE)"
        )

    async def refusal(self, scope: Scope) -> RateLimitedError | None:
        """Count this request if it asks for work; the error to answer where it may not go on."""
        if working_endpoint(scope) is None:
            return None
        return self._error(await self._buckets.take(client_key(scope)))

    async def refusal_of_failure(self, scope: Scope) -> RateLimitedError | None:
        """Count a request whose token failed; the error where its address has no more tries."""
        wait = await self._buckets.take(client_key(scope))
        return self._error(max(wait, await self._buckets.take(_failures_key(scope))))

    async def refusal_after_failures(self, scope: Scope) -> RateLimitedError | None:
        """The error where the address of this request has no more tries; counts nothing."""
        return self._error(await self._buckets.look(_failures_key(scope)))

    def _error(self, wait: float) -> RateLimitedError | None:
        if not wait:
            return None
        seconds = math.ceil(wait)
        return RateLimitedError(
            f"too many requests: {self._allowed}; try again in {seconds} s", retry_after=seconds
        )


def _failures_key(scope: Scope) -> str:
    return f"failures:{scope['state']['client_address']}"


class LimitRate:
    """Answers 429 before the body is read; stands behind the token check, whose names it counts."""

    def __init__(self, app: ASGIApp, limit: RateLimit) -> None:
        self.app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request pass, or refuse it and say when to come again."""
        error = await self._limit.refusal(scope)
        if error is not None:
            await error_response(scope, error)(scope, receive, send)
            return
        await self.app(scope, receive, send)
