"""A token bucket for each client, in memory, or by throttled-py in a Redis that processes share.

It uses the library's GCRA, which is a token bucket that is refilled continuously; the library's own
"token bucket" counts in whole seconds, and so admits too few requests and waits too long. In memory
the library's GCRA rounds: where the clock stands still between requests, as a coarse one does, the
last of a burst is refused.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.util import find_spec
from time import monotonic_ns
from typing import TypeVar

import structlog

from smart_embedder.errors import StartupError

NAMESPACE = "smart-embedder"
Answer = TypeVar("Answer")
# A token in nanoseconds divided by the requests a minute, so that a minute refills these requests.
_TOKEN = 60 * 10**9
# About 190 bytes each.
MAX_CLIENTS = 100_000
# Seconds by which a wait may exceed the time of one token: clocks of Redis may step.
_CLOCK_TOLERANCE = 1.0
# Seconds: the longest wait for an answer, and the pause after a failure.
REDIS_TIMEOUT = 0.25
REDIS_PAUSE = 1.0
# With more concurrent calls each would wait longer, and none would be faster.
_REDIS_CONCURRENCY = 16
log = structlog.get_logger(__name__)


class MemoryBuckets:
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

    async def peek(self, key: str) -> float:
        """The seconds until there is a token, 0 where there is one; takes none."""
        return await self.take(key, taken=0)

    async def take(self, key: str, taken: int = _TOKEN) -> float:
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

    async def close(self) -> None:
        """There is nothing to close."""


class SharedBuckets:
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
        # A tenth of a second, a sixth of the imports until the port opens, for what few use.
        from throttled.asyncio import (  # noqa: PLC0415
            RateLimiterType,
            RedisStore,
            Throttled,
            per_min,
        )
        from throttled.exceptions import StoreUnavailableError  # noqa: PLC0415

        timeouts = {"SOCKET_TIMEOUT": REDIS_TIMEOUT, "SOCKET_CONNECT_TIMEOUT": REDIS_TIMEOUT}
        self._store = RedisStore(server=url, options=timeouts)
        # The library would create it at the first request, too late to report a wrong address.
        self._limiter = Throttled(
            using=RateLimiterType.GCRA.value,
            quota=per_min(requests_per_minute, burst=burst),
            store=self._store,
            key_prefix=NAMESPACE,
        ).limiter
        self._seconds_to_fill_all_but_one = (burst - 1) * 60 / requests_per_minute
        self._own = MemoryBuckets(requests_per_minute, burst)
        self._longest_wait = 60 / requests_per_minute + _CLOCK_TOLERANCE
        self._on_error = on_error
        self._has_warned = False
        self._breaker = CircuitBreaker(
            "rate_limit_store",
            on_error,
            (StoreUnavailableError,),
            while_gone="each process counts the requests that it gets by itself",
            when_back="requests are counted together again",
        )

    async def take(self, key: str) -> float:
        """As `MemoryBuckets.take`."""
        wait = self._believed(await self._breaker.call(partial(self._take, key)))
        return await self._own.take(key) if wait is None else wait

    async def peek(self, key: str) -> float:
        """As `MemoryBuckets.peek`."""
        wait = self._believed(await self._breaker.call(partial(self._peek, key)))
        return await self._own.peek(key) if wait is None else wait

    async def _take(self, key: str) -> float:
        result = await self._limiter.limit(key)
        return result.state.retry_after if result.limited else 0.0

    async def _peek(self, key: str) -> float:
        state = await self._limiter.peek(key)
        # Its retry_after is how long the bucket has been empty.
        return max(0.0, state.reset_after - self._seconds_to_fill_all_but_one)

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


Buckets = MemoryBuckets | SharedBuckets


class CircuitBreaker:
    """Calls a Redis while it answers; after a failure, no call is made during a pause.

    So one that does not answer delays requests only for a moment. Callers can do without an answer;
    one that the client library cannot read counts as none. After the pause one caller tries again,
    while the others still get no answer. `on_error` is called for each failure, one of `errors`.
    Only changes between working and failing are logged, as `{store}_gone` and `{store}_back`, with
    their effect on requests. Neither an address nor a password is ever logged.
    """

    def __init__(
        self,
        store: str,
        on_error: Callable[[], None],
        errors: tuple[type[Exception], ...],
        *,
        while_gone: str,
        when_back: str,
    ) -> None:
        self._gone, self._back = f"{store}_gone", f"{store}_back"
        self._on_error = on_error
        # uvloop raises RuntimeError where a transport was closed under the client; client libraries
        # raise TypeError and ValueError for answers of another type than they expect.
        own = (OSError, RuntimeError, TypeError, ValueError)
        self._errors: tuple[type[Exception], ...] = (*errors, *own)
        self._while_gone = while_gone
        self._when_back = when_back
        self._concurrency = asyncio.Semaphore(_REDIS_CONCURRENCY)
        self._failing = False
        self._retry_at = 0.0

    async def call(self, ask: Callable[[], Awaitable[Answer]]) -> Answer | None:
        """The result of `ask`; None while Redis fails."""
        # The timeout does not include the wait for the semaphore: otherwise a flood, which waits
        # there, would look like a failure of Redis.
        async with self._concurrency:
            if self._failing:
                now = time.monotonic()
                if now < self._retry_at:
                    return None
                # Before the call, so that only one request tries.
                self._retry_at = now + REDIS_PAUSE
            try:
                async with asyncio.timeout(REDIS_TIMEOUT):
                    answer = await ask()
            except self._errors as error:
                self._on_error()
                self._retry_at = time.monotonic() + REDIS_PAUSE
                if not self._failing:
                    self._failing = True
                    reason = str(error.__cause__ or error) or f"no answer in {REDIS_TIMEOUT} s"
                    log.warning(self._gone, reason=reason, effect=self._while_gone)
                return None
        if self._failing:
            self._failing = False
            log.info(self._back, effect=self._when_back)
        return answer
