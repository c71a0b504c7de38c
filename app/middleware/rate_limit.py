"""Refuses the requests of a client that sends more than its share."""

import math

from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.client import client_key
from app.api.errors import error_response
from app.errors import RateLimitedError
from app.limits import Buckets
from app.middleware.endpoints import working_endpoint


class RateLimit:
    """The one rule: whom a request is counted for, and whether it may go on.

    Only POST requests that ask for work count. A named token is counted by its name wherever it
    comes from; the single API_TOKEN, no token and a wrong one by the client's address. So who
    guesses tokens is answered 401 until the address has used its budget up, and 429 from then on;
    whoever holds a named token is not shut out by a guesser behind the same address.
    """

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets

    async def refusal(self, scope: Scope) -> RateLimitedError | None:
        """Count this request; the error to answer where it may not go on."""
        if working_endpoint(scope) is None:
            return None
        wait = await self._buckets.take(client_key(scope))
        if not wait:
            return None
        seconds = math.ceil(wait)
        return RateLimitedError(f"too many requests: try again in {seconds} s", retry_after=seconds)


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
