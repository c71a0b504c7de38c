"""A token bucket for each client, in memory or in a shared Redis, by throttled-py.

It uses the library's GCRA, which is a token bucket that is refilled continuously; the library's own
"token bucket" counts in whole seconds, and so admits too few requests and waits too long.
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Protocol

import structlog
from throttled.asyncio import (
    BaseStore,
    MemoryStore,
    RateLimiterType,
    RedisStore,
    Throttled,
    per_min,
)
from throttled.exceptions import StoreUnavailableError

from app.access import circuit_breaker
from app.errors import StartupError

NAMESPACE = "smart-embedder"

# About 270 bytes each.
MAX_CLIENTS = 100_000
# Seconds by which a wait may exceed the time of one token: clocks of Redis may step.
_CLOCK_TOLERANCE = 1.0

log = structlog.get_logger(__name__)


class Buckets(Protocol):
    """One token bucket for each key."""

    async def take(self, key: str) -> float:
        """Take a token: 0, or the seconds until there is one where the bucket is empty."""
        ...

    async def peek(self, key: str) -> float:
        """The seconds until there is a token, 0 where there is one; takes none."""
        ...

    async def close(self) -> None:
        """Close connections."""
        ...


class StoredBuckets:
    """Buckets of one size in any of the library's stores; raises the store's errors."""

    def __init__(self, store: BaseStore, requests_per_minute: int, burst: int) -> None:
        self._throttled = Throttled(
            using=RateLimiterType.GCRA.value,
            quota=per_min(requests_per_minute, burst=burst),
            store=store,
            key_prefix=NAMESPACE,
        )
        self._seconds_to_fill_all_but_one = (burst - 1) * 60 / requests_per_minute
        # The library would create it at the first request, too late to report a wrong address.
        self._limiter = self._throttled.limiter

    async def take(self, key: str) -> float:
        """Take a token: 0, or the seconds until there is one where the bucket is empty."""
        result = await self._limiter.limit(key)
        return result.state.retry_after if result.limited else 0.0

    async def peek(self, key: str) -> float:
        """The seconds until there is a token, 0 where there is one; takes none."""
        state = await self._limiter.peek(key)
        # Its retry_after is how long the bucket has been empty.
        return max(0.0, state.reset_after - self._seconds_to_fill_all_but_one)


class MemoryBuckets(StoredBuckets):
    """The buckets of one process, at most `max_clients` of them.

    Above that the least recently seen client is forgotten, and so has its whole burst again. With
    the default settings that changes nothing: a bucket is full again after two seconds. A flood
    from more addresses than that passes this limit, but not the queue's; memory stays bounded.
    """

    def __init__(
        self, requests_per_minute: int, burst: int, max_clients: int = MAX_CLIENTS
    ) -> None:
        self._store = MemoryStore(options={"MAX_SIZE": max_clients})
        super().__init__(self._store, requests_per_minute, burst)

    def __len__(self) -> int:
        # The library has no public way to ask for the size.
        return len(self._store._backend.get_client())  # noqa: SLF001

    async def close(self) -> None:
        """There is nothing to close."""


class SharedBuckets(StoredBuckets):
    """Buckets in a Redis that several processes share; while it fails, each process has its own.

    The first request connects. `on_error` is called for each failure. Neither the address nor its
    password is ever logged.
    """

    def __init__(
        self, url: str, requests_per_minute: int, burst: int, on_error: Callable[[], None]
    ) -> None:
        if find_spec("redis") is None:
            raise StartupError(
                "RATE_LIMIT_STORE names a Redis, and the package redis is not installed: "
                "pip install 'smart-embedder[cluster]'"
            )
        timeouts = {
            "SOCKET_TIMEOUT": circuit_breaker.REDIS_TIMEOUT,
            "SOCKET_CONNECT_TIMEOUT": circuit_breaker.REDIS_TIMEOUT,
        }
        self._store = RedisStore(server=url, options=timeouts)
        super().__init__(self._store, requests_per_minute, burst)
        self._own = MemoryBuckets(requests_per_minute, burst)
        self._longest_wait = 60 / requests_per_minute + _CLOCK_TOLERANCE
        self._on_error = on_error
        self._has_warned = False
        self._breaker = circuit_breaker.CircuitBreaker(
            "rate_limit_store",
            on_error,
            (StoreUnavailableError,),
            while_gone="each process counts the requests that it gets by itself",
            when_back="requests are counted together again",
        )

    async def take(self, key: str) -> float:
        """Take a token: 0, or the seconds until there is one."""
        wait = self._believed(await self._breaker.call(partial(super().take, key)))
        return await self._own.take(key) if wait is None else wait

    async def peek(self, key: str) -> float:
        """The seconds until there is a token; 0 where there is one."""
        wait = self._believed(await self._breaker.call(partial(super().peek, key)))
        return await self._own.peek(key) if wait is None else wait

    def _believed(self, wait: float | None) -> float | None:
        """The wait, if this bucket can have it; None for any other: who wrote it is not known."""
        if wait is None or 0 <= wait <= self._longest_wait:
            return wait
        self._on_error()
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "rate_limit_store_not_believed",
                reason=f"a bucket is said to have a token in {wait:g} s",
                effect="this process counts the requests of such a client by itself",
                advice="see who else writes to the Redis of RATE_LIMIT_STORE",
            )
        return None

    async def close(self) -> None:
        """Close the connections."""
        # The library has no public way to close its client.
        client = self._store._backend.get_client()  # noqa: SLF001
        await client.aclose(close_connection_pool=True)  # type: ignore[attr-defined]
