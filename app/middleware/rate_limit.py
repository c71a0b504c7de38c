"""Token buckets: how much each client may still send; `auth` decides with them.

A bucket is one number, the time at which it will be full again (GCRA), so it needs no timer. Each
process counts separately.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass
from time import monotonic_ns

from app.errors import RateLimitedError

# The cost of a request. Times are nanoseconds multiplied by the requests per minute, so that the
# cost is a whole number: one minute.
_REQUEST = 60 * 10**9
# About 190 bytes each.
MAX_CLIENTS = 100_000


class TokenBuckets:
    """The buckets of at most `max_clients` clients.

    Above that, the least recently seen client is forgotten and gets its whole burst again. With the
    default settings a bucket is full after two seconds anyway. A flood from more addresses evades
    the rate limit, but the queue still limits each of them.

    Times are integers, so that rounding never turns a burst of 50 into 49.
    """

    def __init__(
        self, requests_per_minute: int, burst: int, max_clients: int = MAX_CLIENTS
    ) -> None:
        self._requests_per_minute = requests_per_minute
        self._depth = (burst - 1) * _REQUEST
        self._max_clients = max_clients
        self._full_at: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._full_at)

    def peek(self, key: str) -> float:
        """Return the seconds until a request is allowed, 0 if one is; count none."""
        return self.take(key, 0)

    def take(self, key: str, count: int = 1) -> float:
        """Count a request and return 0; if none is allowed, return the seconds until one is.

        A `count` of several is allowed where one is, and delays those that follow.
        """
        now = monotonic_ns() * self._requests_per_minute
        full_at = max(now, self._full_at.get(key, now))
        wait = max(0, full_at - now - self._depth)
        if wait == 0:
            full_at += count * _REQUEST
        if full_at > now:
            self._full_at[key] = full_at
            self._full_at.move_to_end(key)
            if len(self._full_at) > self._max_clients:
                self._full_at.popitem(last=False)
        return wait / (self._requests_per_minute * 10**9)

    def state(self, key: str) -> tuple[int, int]:
        """Return how many requests are left, and the seconds until the bucket is full again."""
        now = monotonic_ns() * self._requests_per_minute
        missing = max(0, self._full_at.get(key, now) - now)
        left = max(0, self._depth + _REQUEST - missing) // _REQUEST
        return left, math.ceil(missing / (self._requests_per_minute * 10**9))


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """What API_TOKENS_FILE says of a named token; None where it sets no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    weight: int = 1


class TokenLimits:
    """The limits of one named token in this process, and its weight in the queue.

    A minute's worth may be used at once. Tokens are charged once they have been counted: a request
    is accepted while any are left, and one that takes more than are left delays those that follow.
    """

    def __init__(self, name: str, terms: TokenTerms) -> None:
        self.terms = terms
        self._name = name
        self._buckets = {
            unit: TokenBuckets(limit, limit, max_clients=1)
            for unit, limit in (
                ("requests", terms.requests_per_minute),
                ("tokens", terms.tokens_per_minute),
            )
            if limit is not None
        }
        # RateLimit-Policy of draft-ietf-httpapi-ratelimit-headers.
        self._policy = ", ".join(
            f'"{unit}";q={getattr(terms, f"{unit}_per_minute")};w=60' for unit in self._buckets
        )

    @property
    def limits_requests(self) -> bool:
        """Whether the token has a limit of requests of its own."""
        return "requests" in self._buckets

    def accept_request(self) -> RateLimitedError | None:
        """Count a request; return an error if it is too early for one."""
        return self._take("tokens", 0) or self._take("requests", 1)

    def charge(self, tokens: int) -> None:
        """Count tokens; raise `RateLimitedError` if none are left."""
        if (error := self._take("tokens", tokens)) is not None:
            raise error

    def _take(self, unit: str, count: int) -> RateLimitedError | None:
        bucket = self._buckets.get(unit)
        if bucket is None or not (wait := bucket.take("", count)):
            return None
        limit, seconds = getattr(self.terms, f"{unit}_per_minute"), math.ceil(wait)
        return RateLimitedError(
            f"too many {unit}: {limit} a minute are allowed ({unit}_per_minute of {self._name} in "
            f"API_TOKENS_FILE); try again in {seconds} s",
            retry_after=seconds,
        )

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of a response: the limits, and what is left of them."""
        if not self._buckets:
            return []
        states = {unit: bucket.state("") for unit, bucket in self._buckets.items()}
        left = ", ".join(f'"{unit}";r={left};t={full}' for unit, (left, full) in states.items())
        return [(b"ratelimit-policy", self._policy.encode()), (b"ratelimit", left.encode())]
