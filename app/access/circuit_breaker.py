"""A circuit breaker: a Redis that does not answer delays requests only for a moment.

Its callers can do without an answer. One that the client library cannot read counts as none.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

log = structlog.get_logger(__name__)

Answer = TypeVar("Answer")

# Seconds: the longest wait for an answer, and the pause after a failure.
REDIS_TIMEOUT = 0.25
REDIS_PAUSE = 1.0
# With more concurrent calls each would wait longer, and none would be faster.
_REDIS_CONCURRENCY = 16


class CircuitBreaker:
    """Calls a Redis while it answers; after a failure, no call is made during a pause.

    After the pause one caller tries again, while the others still get no answer. `on_error` is
    called for each failure, one of `errors`. Only changes between working and failing are logged,
    as `{store}_gone` and `{store}_back`, with their effect on requests. Neither an address nor a
    password is ever logged.
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
