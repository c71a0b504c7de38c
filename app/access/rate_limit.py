"""A token bucket for each client, in memory or in a shared Redis, by throttled-py.

It uses the library's GCRA, which is a token bucket that is refilled continuously; the library's own
"token bucket" counts in whole seconds, and so admits too few requests and waits too long.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
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

from app.errors import StartupError

log = structlog.get_logger(__name__)

NAMESPACE = "smart-embedder"

# About 270 bytes each.
MAX_CLIENTS = 100_000

# The most that a Redis which does not answer may cost a request, and how long it is then not asked.
REDIS_TIMEOUT = 0.25
REDIS_PAUSE = 1.0
# More concurrent calls would be no faster, and each would take longer than Redis needs.
_REDIS_CONCURRENCY = 16


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
    """Buckets in a Redis that several processes share; while Redis fails, nobody is limited.

    The first request connects. After a failure every request passes without asking Redis until the
    pause is over; then one request tries again while the others still pass. `on_error` is called
    for each failure; the log holds only the changes between working and failing. Neither the
    address nor its password is ever logged.
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
            "SOCKET_TIMEOUT": REDIS_TIMEOUT,
            "SOCKET_CONNECT_TIMEOUT": REDIS_TIMEOUT,
        }
        self._store = RedisStore(server=url, options=timeouts)
        super().__init__(self._store, requests_per_minute, burst)
        self._on_error = on_error
        self._concurrency = asyncio.Semaphore(_REDIS_CONCURRENCY)
        self._failing = False
        self._retry_at = 0.0

    async def take(self, key: str) -> float:
        """Take a token: 0, or the seconds until there is one; 0 where Redis fails."""
        return await self._query(super().take, key)

    async def peek(self, key: str) -> float:
        """The seconds until there is a token; 0 where there is one or Redis fails."""
        return await self._query(super().peek, key)

    async def _query(self, call: Callable[[str], Awaitable[float]], key: str) -> float:
        # The timeout does not include the wait for the semaphore: otherwise a flood, which waits
        # there, would look like a failure of Redis and lift the limit.
        async with self._concurrency:
            if not self._may_try():
                return 0.0
            try:
                async with asyncio.timeout(REDIS_TIMEOUT):
                    wait = await call(key)
            # uvloop raises RuntimeError where a transport was closed under the client.
            except (StoreUnavailableError, OSError, RuntimeError) as error:
                self._record_failure(error)
                return 0.0
        self._record_success()
        return wait

    async def close(self) -> None:
        """Close the connections."""
        # The library has no public way to close its client.
        client = self._store._backend.get_client()  # noqa: SLF001
        await client.aclose(close_connection_pool=True)  # type: ignore[attr-defined]

    def _may_try(self) -> bool:
        if not self._failing:
            return True
        now = time.monotonic()
        if now < self._retry_at:
            return False
        # Before the call, so that only one request tries.
        self._retry_at = now + REDIS_PAUSE
        return True

    def _record_failure(self, error: Exception) -> None:
        self._on_error()
        self._retry_at = time.monotonic() + REDIS_PAUSE
        if not self._failing:
            self._failing = True
            reason = str(error.__cause__ or error) or f"no answer in {REDIS_TIMEOUT} s"
            log.warning("rate_limit_store_gone", reason=reason, effect="requests are not limited")

    def _record_success(self) -> None:
        if self._failing:
            self._failing = False
            log.info("rate_limit_store_back", effect="requests are limited again")
