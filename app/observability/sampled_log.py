"""Warnings that clients can cause as often as they like, written now and then."""

import time
from collections import Counter

import structlog

log = structlog.get_logger(__name__)


class SampledLog:
    """Writes of each event one line in `seconds`, which tells how many were left out before it."""

    def __init__(self, seconds: float = 10.0) -> None:
        self._seconds = seconds
        self._quiet_until: dict[str, float] = {}
        self._left_out: Counter[str] = Counter()

    def warning(self, event: str, **facts: object) -> None:
        """Write the event, or count it where one of its kind was written just now."""
        now = time.monotonic()
        if now < self._quiet_until.get(event, now):
            self._left_out[event] += 1
            return
        self._quiet_until[event] = now + self._seconds
        log.warning(event, **facts, left_out=self._left_out.pop(event, 0))
