"""Refuses the requests of a client that sends more than its share."""

import math
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.errors import error_response
from app.errors import RateLimitedError
from app.limits import Buckets, Network, client_address, network_key, unmapped
from app.middleware.endpoints import working_endpoint
from app.tokens import DEFAULT_NAME


class RateLimit:
    """The one rule: whom a request is counted for, and whether it may go on.

    Only POST requests that ask for work count. A named token is counted by its name wherever it
    comes from; the single API_TOKEN, no token and a wrong one by the client's address. So who
    guesses tokens is answered 401 until the address has used its budget up, and 429 from then on;
    whoever holds a named token is not shut out by a guesser behind the same address.
    """

    def __init__(self, buckets: Buckets, trusted_proxies: Sequence[Network]) -> None:
        self._buckets = buckets
        self._trusted_proxies = [unmapped(network) for network in trusted_proxies]

    async def refusal(self, scope: Scope) -> RateLimitedError | None:
        """Count this request; the error to answer where it may not go on."""
        if working_endpoint(scope) is None:
            return None
        wait = await self._buckets.take(self._key_of(scope))
        if not wait:
            return None
        seconds = math.ceil(wait)
        return RateLimitedError(f"too many requests: try again in {seconds} s", retry_after=seconds)

    def _key_of(self, scope: Scope) -> str:
        name = scope["state"].get("token_name", DEFAULT_NAME)
        if name != DEFAULT_NAME:
            return f"token:{name}"
        peer, _ = scope["client"] or ("", 0)
        forwarded_for = ",".join(Headers(scope=scope).getlist("x-forwarded-for"))
        address = client_address(peer, forwarded_for, self._trusted_proxies)
        return f"address:{network_key(address)}"


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
