"""How long one forward may take, and whether one has taken so long that the device is stuck."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from app.jobs import Batch, Job

GPU_SECONDS = 15.0
CPU_SECONDS = 30.0
_GENEROSITY = 5.0
# A sequence this long takes twice the time for each token that the probe's short ones take, because
# attention grows with the length (bge-m3 on a CPU; other models and GPUs reach that later).
_DOUBLED_LENGTH = 2048


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
        lengths = [len(ids) for ids in batch.sequences]
        tokens = sum(length * (1 + length / _DOUBLED_LENGTH) for length in lengths)
        return max(self.least, _GENEROSITY * tokens * self.seconds_per_token)

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
    """Knows since when the device has been away, and until when it may be."""

    def __init__(self) -> None:
        self._limits: list[float] = []
        self._since = 0.0

    @contextmanager
    def over(self, limit: float) -> Iterator[None]:
        """A forward that may take `limit` seconds once the one before it is back."""
        if not self._limits:
            self._since = time.monotonic()
        self._limits.append(limit)
        try:
            yield
        finally:
            self._limits.remove(limit)
            self._since = time.monotonic()

    @property
    def stuck_seconds(self) -> float:
        """How long no forward has come back, once that is twice what one may take; else 0."""
        if not self._limits:
            return 0.0
        away = time.monotonic() - self._since
        return away if away > 2 * max(self._limits) else 0.0
