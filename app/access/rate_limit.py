"""A token bucket for each client, kept by throttled-py.

Its GCRA and not its "token bucket" is used: GCRA is the same bucket refilled continuously, told in
one number; the other counts in whole seconds and so admits too few and waits too long.
"""

from typing import Protocol

from throttled.asyncio import BaseStore, MemoryStore, RateLimiterType, Throttled, per_min

NAMESPACE = "smart-embedder"

# About 270 bytes each.
MOST_CLIENTS = 100_000


class Buckets(Protocol):
    """One token bucket for each key."""

    async def take(self, key: str) -> float:
        """Take a token: 0, or the seconds until there is one where the bucket is empty."""
        ...

    async def look(self, key: str) -> float:
        """The seconds until there is a token, 0 where there is one; takes none."""
        ...

    async def close(self) -> None:
        """Give back what is held."""
        ...


class StoredBuckets:
    """Buckets of one size in any of the library's stores; the store's errors pass through."""

    def __init__(self, store: BaseStore, requests_per_minute: int, burst: int) -> None:
        self._throttled = Throttled(
            using=RateLimiterType.GCRA.value,
            quota=per_min(requests_per_minute, burst=burst),
            store=store,
            key_prefix=NAMESPACE,
        )
        self._seconds_of_all_but_one = (burst - 1) * 60 / requests_per_minute
        # Made by the library at the first request otherwise, too late for a wrong address.
        self._limiter = self._throttled.limiter

    async def take(self, key: str) -> float:
        """Take a token: 0, or the seconds until there is one where the bucket is empty."""
        result = await self._limiter.limit(key)
        return result.state.retry_after if result.limited else 0.0

    async def look(self, key: str) -> float:
        """The seconds until there is a token, 0 where there is one; takes none."""
        state = await self._limiter.peek(key)
        # Its own retry_after is how long the bucket has been empty.
        return max(0.0, state.reset_after - self._seconds_of_all_but_one)


class MemoryBuckets(StoredBuckets):
    """The buckets of one process, at most `most_clients` of them.

    Above that the client not seen for longest is forgotten, and so has its whole burst again. That
    costs nothing by default: a bucket is full after two seconds, and a full one says no more than
    none. A flood from more addresses than are kept is no longer slowed by this limit, only by the
    queue's; memory stays bounded.
    """

    def __init__(
        self, requests_per_minute: int, burst: int, most_clients: int = MOST_CLIENTS
    ) -> None:
        self._store = MemoryStore(options={"MAX_SIZE": most_clients})
        super().__init__(self._store, requests_per_minute, burst)

    def __len__(self) -> int:
        # The library shows its size nowhere else.
        return len(self._store._backend.get_client())  # noqa: SLF001

    async def close(self) -> None:
        """Nothing is held."""
