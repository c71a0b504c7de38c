"""How long one forward may take, and whether one has taken so long that the device is stuck."""

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from app.engine.batch import Batch

GPU_SECONDS = 15.0
CPU_SECONDS = 30.0
_GENEROSITY = 5.0
# A sequence this long takes twice the time for each token that the probe's short ones take, because
# attention grows with the length (bge-m3 on a CPU; other models and GPUs reach that later).
_DOUBLED_LENGTH = 2048
# The clocks of the event loop and of this module may differ by their resolution.
_A_MOMENT = 0.01


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
        lengths = np.fromiter(map(len, batch.sequences), dtype=np.float64)
        tokens = float((lengths * (1 + lengths / _DOUBLED_LENGTH)).sum())
        return max(self.least, _GENEROSITY * tokens * self.seconds_per_token)

    def split(self, batch: Batch) -> "BatchLimits":
        """For each slice of a batch by itself, and for the device."""
        whole = self.of_batch(batch)
        jobs = [part.job for part in batch.slices]
        return BatchLimits(
            slices=[whole if job.time_left is None else job.time_left for job in jobs],
            device=max(whole if job.time_limit is None else job.time_limit for job in jobs),
        )


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Seconds that one forward may take: `slices` for each slice's caller, in order.

    `device` is how long the device may be away: a job that has little time left says nothing of
    that.
    """

    slices: list[float]
    device: float


class Watch:
    """Knows since when the device has been away, and until when it may be.

    `on_stuck` is called once no forward has come back for twice as long as one may take.
    """

    def __init__(self, on_stuck: Callable[[], None]) -> None:
        self._on_stuck = on_stuck
        self._limits: list[float] = []
        self._since = 0.0
        self._alarm: asyncio.TimerHandle | None = None

    @contextmanager
    def over(self, limit: float) -> Iterator[None]:
        """A forward that may take `limit` seconds once the one before it is back."""
        if not self._limits:
            self._since = time.monotonic()
        self._limits.append(limit)
        self._set_alarm()
        try:
            yield
        finally:
            self._limits.remove(limit)
            self._since = time.monotonic()
            self._set_alarm()

    @property
    def stuck_seconds(self) -> float:
        """How long no forward has come back, once that is twice what one may take; else 0."""
        longest = max(self._limits, default=math.inf)
        away = time.monotonic() - self._since
        return away if away > 2 * longest else 0.0

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._limits:
            left = self._since + 2 * max(self._limits) - time.monotonic()
            loop = asyncio.get_running_loop()
            self._alarm = loop.call_later(max(0.0, left) + _A_MOMENT, self._on_stuck)
