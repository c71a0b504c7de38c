"""A circuit breaker: a Redis that is away costs nobody more than a moment.

Whatever is asked of Redis here can be done without: then the caller goes on with something else.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

log = structlog.get_logger(__name__)

Answer = TypeVar("Answer")

# The most that a Redis which does not answer may cost a request, and how long it is then not asked.
REDIS_TIMEOUT = 0.25
REDIS_PAUSE = 1.0
# More concurrent calls would be no faster, and each would take longer than Redis needs.
_REDIS_CONCURRENCY = 16


class CircuitBreaker:
    """Asks a Redis as long as it answers; after a failure, nobody asks it for a while.

    When that is over, one caller tries again while the others still go without. `on_error` is
    called for each failure, which is one of `errors`; the log holds only the changes between
    working and failing, as `{store}_gone` and `{store}_back`, with what each means for requests.
    Neither an address nor a password is ever logged.
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
        # uvloop raises RuntimeError where a transport was closed under the client.
        self._errors: tuple[type[Exception], ...] = (*errors, OSError, RuntimeError)
        self._while_gone = while_gone
        self._when_back = when_back
        self._concurrency = asyncio.Semaphore(_REDIS_CONCURRENCY)
        self._failing = False
        self._retry_at = 0.0

    async def call(self, ask: Callable[[], Awaitable[Answer]]) -> Answer | None:
        """What `ask` returns; None while Redis fails."""
        # The timeout does not include the wait for the semaphore: otherwise a flood, which waits
        # there, would look like a failure of Redis.
        async with self._concurrency:
            if not self._may_try():
                return None
            try:
                async with asyncio.timeout(REDIS_TIMEOUT):
                    answer = await ask()
            except self._errors as error:
                self._record_failure(error)
                return None
        self._record_success()
        return answer

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
            log.warning(self._gone, reason=reason, effect=self._while_gone)

    def _record_success(self) -> None:
        if self._failing:
            self._failing = False
            log.info(self._back, effect=self._when_back)
