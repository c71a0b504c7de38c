"""A token bucket for each client.

A bucket is one number, the time at which it will be full again (GCRA), so it is refilled without a
timer. Each process counts by itself.
"""

from collections import OrderedDict
from time import monotonic_ns

# A token in nanoseconds divided by the requests a minute, so that a minute refills these requests.
_TOKEN = 60 * 10**9
# About 190 bytes each.
MAX_CLIENTS = 100_000


class TokenBuckets:
    """The buckets of one process, at most `max_clients` of them.

    Above that the least recently seen client is forgotten, and so has its whole burst again. With
    the default settings that changes nothing: a bucket is full again after two seconds. A flood
    from more addresses than that passes this limit, but not the queue's; memory stays bounded.

    A bucket is the time at which it will be full again, in the unit of `_TOKEN`: a whole number,
    so that a burst of 50 is never 49 because 50 intervals were rounded.
    """

    def __init__(
        self, requests_per_minute: int, burst: int, max_clients: int = MAX_CLIENTS
    ) -> None:
        self._requests_per_minute = requests_per_minute
        self._depth = (burst - 1) * _TOKEN
        self._max_clients = max_clients
        self._full_at: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._full_at)

    def peek(self, key: str) -> float:
        """The seconds until there is a token, 0 where there is one; takes none."""
        return self.take(key, taken=0)

    def take(self, key: str, taken: int = _TOKEN) -> float:
        """Take a token: 0, or the seconds until there is one where the bucket is empty."""
        now = monotonic_ns() * self._requests_per_minute
        full_at = max(now, self._full_at.get(key, now))
        wait = max(0, full_at - now - self._depth)
        if wait == 0:
            full_at += taken
        if full_at > now:
            self._full_at[key] = full_at
            self._full_at.move_to_end(key)
            if len(self._full_at) > self._max_clients:
                self._full_at.popitem(last=False)
        return wait / (self._requests_per_minute * 10**9)
