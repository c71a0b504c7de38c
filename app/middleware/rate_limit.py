"""Token buckets: how many requests each client may still send; `auth` decides with them.

A bucket is one number, the time at which it will be full again (GCRA), so it needs no timer. Each
process counts separately.
"""

from collections import OrderedDict
from time import monotonic_ns

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
        return self.take(key, cost=0)

    def take(self, key: str, cost: int = _REQUEST) -> float:
        """Count a request and return 0; if none is allowed, return the seconds until one is."""
        now = monotonic_ns() * self._requests_per_minute
        full_at = max(now, self._full_at.get(key, now))
        wait = max(0, full_at - now - self._depth)
        if wait == 0:
            full_at += cost
        if full_at > now:
            self._full_at[key] = full_at
            self._full_at.move_to_end(key)
            if len(self._full_at) > self._max_clients:
                self._full_at.popitem(last=False)
        return wait / (self._requests_per_minute * 10**9)
