"""How long one forward may take, and whether one has taken so long that the device is stuck."""

import time
from dataclasses import dataclass

from app.jobs import Batch, Job

GPU_SECONDS = 15.0
CPU_SECONDS = 30.0
_GENEROSITY = 5.0


@dataclass(frozen=True, slots=True)
class ForwardLimit:
    """The most seconds of one forward: `fixed` where it was set, else `least` or more.

    More where a batch is large for the device: five times what `seconds_per_token`, measured at the
    start, predicts for it. A job with a time limit of its own is held to that instead.
    """

    fixed: float | None
    least: float
    seconds_per_token: float = 0.0

    def of_batch(self, batch: Batch) -> float:
        """For a whole batch."""
        if self.fixed is not None:
            return self.fixed
        return max(self.least, _GENEROSITY * batch.tokens * self.seconds_per_token)

    def of_job(self, job: Job, batch: Batch) -> float:
        """What is left to one job in this batch."""
        if job.time_limit is None:
            return self.of_batch(batch)
        return job.time_limit - job.inference_seconds

    def of_device(self, batch: Batch) -> float:
        """How long the device may be away: a job that has little time left says nothing of that."""
        limits = [share.job.time_limit for share in batch.shares]
        return max(self.of_batch(batch) if limit is None else limit for limit in limits)


class Watch:
    """Knows since when the device has been in a forward, and until when it may be."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._limit = 0.0

    def begin(self, limit: float) -> None:
        """A forward begins, which may take `limit` seconds."""
        self._began, self._limit = time.monotonic(), limit

    def end(self) -> None:
        """The forward came back."""
        self._began = None

    @property
    def stuck_seconds(self) -> float:
        """How long the device has been away, once that is twice what it may take; else 0."""
        if self._began is None:
            return 0.0
        away = time.monotonic() - self._began
        return away if away > 2 * self._limit else 0.0
