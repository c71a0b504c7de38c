"""Buckets in a Redis that several processes share, and what happens while it is gone."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog
from throttled.asyncio import RedisStore
from throttled.exceptions import StoreUnavailableError

from app.access.rate_limit import StoredBuckets

log = structlog.get_logger(__name__)

# The most that a silent Redis may cost a request, and how long it is then left alone.
PATIENCE_SECONDS = 0.25
PAUSE_SECONDS = 1.0

# Asked at once. More would be no faster, and would each take longer than Redis needs.
_PLACES = 16


class SharedBuckets(StoredBuckets):
    """Buckets in Redis; a Redis that is gone or hangs limits nobody.

    Nothing is connected before the first request. After a failure every request passes unasked
    until the pause is over; then one request asks again while the others still pass. `on_error` is
    called for each failure; the log tells only of the change from one state to the other. Neither
    the address nor its password is ever logged.
    """

    def __init__(
        self, url: str, requests_per_minute: int, burst: int, on_error: Callable[[], None]
    ) -> None:
        timeouts = {
            "SOCKET_TIMEOUT": PATIENCE_SECONDS,
            "SOCKET_CONNECT_TIMEOUT": PATIENCE_SECONDS,
        }
        self._store = RedisStore(server=url, options=timeouts)
        super().__init__(self._store, requests_per_minute, burst)
        self._on_error = on_error
        self._places = asyncio.Semaphore(_PLACES)
        self._failing = False
        self._ask_again_at = 0.0

    async def take(self, key: str) -> float:
        """Take a token: 0, or the seconds until there is one; 0 where Redis cannot be asked."""
        return await self._ask(super().take, key)

    async def look(self, key: str) -> float:
        """The seconds until there is a token; 0 where there is one or Redis cannot be asked."""
        return await self._ask(super().look, key)

    async def _ask(self, question: Callable[[str], Awaitable[float]], key: str) -> float:
        # Patience counts from the asking: a flood, which waits here, must not look like a failure
        # of Redis and so lift the limit.
        async with self._places:
            if not self._may_ask():
                return 0.0
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    wait = await question(key)
            # uvloop raises RuntimeError where a transport was closed under the client.
            except (StoreUnavailableError, OSError, RuntimeError) as error:
                self._note_failure(error)
                return 0.0
        self._note_success()
        return wait

    async def close(self) -> None:
        """Close the connections."""
        # The library lends its client to nobody, and does not close it.
        client = self._store._backend.get_client()  # noqa: SLF001
        await client.aclose(close_connection_pool=True)  # type: ignore[attr-defined]

    def _may_ask(self) -> bool:
        if not self._failing:
            return True
        now = time.monotonic()
        if now < self._ask_again_at:
            return False
        # Before asking, so that one request alone finds out.
        self._ask_again_at = now + PAUSE_SECONDS
        return True

    def _note_failure(self, error: Exception) -> None:
        self._on_error()
        self._ask_again_at = time.monotonic() + PAUSE_SECONDS
        if not self._failing:
            self._failing = True
            reason = str(error.__cause__ or error) or f"no answer in {PATIENCE_SECONDS} s"
            log.warning("rate_limit_store_gone", reason=reason, effect="requests are not limited")

    def _note_success(self) -> None:
        if self._failing:
            self._failing = False
            log.info("rate_limit_store_back", effect="requests are limited again")
