"""Decides whether a request is sent again, and after which pause."""

import random
from dataclasses import dataclass

from smart_embedder_client.errors import CONNECTION_LOST, UNREACHABLE, SmartEmbedderError

_BUSY = (429, 503)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 8.0
# Random, so that clients that were refused together do not return together.
_JITTER = 0.25


@dataclass(slots=True)
class Retries:
    """The remaining tries of one request.

    A request is sent again after 429 and 503 with a Retry-After, no earlier than that says, and
    after a failure to connect, with pauses that double. After any other error it would fail again,
    or be computed twice. A request that `resumes` asks only for what has no answer, so it is sent
    again after a lost connection, too.
    """

    max_retries: int
    max_wait: float
    resumes: bool = False
    _done: int = 0
    _waited: float = 0.0

    def pause_after(self, error: SmartEmbedderError) -> float:
        """Seconds to wait before the next try; raises `error` if there is none."""
        pause = self._pause(error)
        if pause is None or self._done >= self.max_retries or self._waited + pause > self.max_wait:
            raise error
        pause = min(pause * random.uniform(1, 1 + _JITTER), self.max_wait - self._waited)  # noqa: S311 - no secret
        self._done += 1
        self._waited += pause
        return pause

    def _pause(self, error: SmartEmbedderError) -> float | None:
        if error.code == UNREACHABLE or (self.resumes and error.code == CONNECTION_LOST):
            return min(_FIRST_PAUSE * 2.0**self._done, _LONGEST_PAUSE)
        return error.retry_after if error.status in _BUSY else None
