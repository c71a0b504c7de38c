"""Limits of a forward: its seconds, with a watchdog for stuck devices, and its tokens."""

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from smart_embedder.errors import InferenceTimeoutError
from smart_embedder.interface import Model
from smart_embedder.scheduling.batcher import Batch, BatchLimits

GPU_SECONDS = 15.0
CPU_SECONDS = 30.0
_SAFETY_FACTOR = 5.0
# At this length a token takes twice as long as in the short sequences of the measurement at
# startup, because the cost of attention grows with the length (bge-m3 on a CPU; other models and
# GPUs reach this at longer lengths).
_DOUBLED_LENGTH = 2048
# Seconds by which the clocks of the event loop and of this module may differ.
_CLOCK_TOLERANCE = 0.01
# Seconds between two checks of the watchdog. If a check is later than this, the process was
# stopped in the meantime.
_CHECK_INTERVAL = 1.0
# Seconds; the event loop cannot wait for less.
_CLOCK_RESOLUTION = 1e-7
# After a token budget was halved, each forward that fits adds a hundredth of the full budget.
_RECOVERY_STEPS = 100


@dataclass(frozen=True, slots=True)
class ForwardLimit:
    """The time limit of a forward, in seconds.

    It is `fixed` if set, else five times the predicted duration of the batch, but at least
    `minimum`. Jobs with their own time limit have that instead.
    """

    fixed: float | None
    minimum: float

    def for_batch(self, batch: Batch, seconds_per_token: float) -> float:
        """Return the limit for jobs without their own time limit."""
        if self.fixed is not None:
            return self.fixed
        return max(self.minimum, _SAFETY_FACTOR * predict_seconds(batch, seconds_per_token))

    def for_device(self, batch: Batch, seconds_per_token: float) -> float:
        """Return the longest limit of all jobs, including the time that they have already spent."""
        batch_limit = self.for_batch(batch, seconds_per_token)
        jobs = (part.job for part in batch.slices)
        return max(batch_limit if job.time_limit is None else job.time_limit for job in jobs)


def predict_seconds(batch: Batch, seconds_per_token: float) -> float:
    """Predict the duration of a batch from the measurement at startup; 0 without one."""
    squares = sum(length * length for length in map(len, batch.sequences))
    return (batch.tokens + squares / _DOUBLED_LENGTH) * seconds_per_token


@dataclass(slots=True)
class ServiceRate:
    """A moving average of the tokens per second of a device."""

    tokens_per_second: float = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """Add the rate of one forward to the average."""
        current = tokens / max(seconds, 1e-9)
        average = self.tokens_per_second or current
        self.tokens_per_second = 0.8 * average + 0.2 * current


class DeviceWatchdog:
    """Measures how long the device has not returned from a forward.

    `on_stuck` is called when no forward has returned for twice its time limit. Time during which
    the process is stopped, or the machine suspended, does not count: the watchdog checks once a
    second, and if a check is much later, the time since the previous check is left out.
    """

    def __init__(self, on_stuck: Callable[[], None]) -> None:
        self._on_stuck = on_stuck
        self._limits: list[float] = []
        self._since = 0.0
        self._alarm: asyncio.TimerHandle | None = None
        self._last_check, self._next_check = 0.0, math.inf
        # Start and end of each period in which the process was stopped.
        self._stops: list[tuple[float, float]] = []

    @contextmanager
    def watch(self, limit: float) -> Iterator[None]:
        """Watch a forward that may take `limit` seconds from the end of the previous one."""
        if not self._limits:
            self._since = time.perf_counter()
            self._stops.clear()
        self._limits.append(limit)
        self._set_alarm()
        try:
            yield
        finally:
            self._limits.remove(limit)
            self._since = time.perf_counter()
            self._set_alarm()

    @property
    def stuck_seconds(self) -> float:
        """Seconds since a forward last returned, if more than twice the time limit; else 0."""
        seconds = self._seconds_since_return()
        return seconds if seconds > 2 * max(self._limits, default=math.inf) else 0.0

    def get_stopped_seconds(self, since: float) -> float:
        """Return for how long the process was stopped since then, while a forward was watched."""
        stops = self._stops + self._current_stop()
        return sum(end - max(start, since) for start, end in stops if end > since)

    def _seconds_since_return(self) -> float:
        return time.perf_counter() - self._since - self.get_stopped_seconds(self._since)

    def _current_stop(self) -> list[tuple[float, float]]:
        now = time.perf_counter()
        return [(self._last_check, now)] if now - self._next_check > _CHECK_INTERVAL else []

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._stops += self._current_stop()
        self._next_check = math.inf
        if self._limits:
            left = max(0.0, 2 * max(self._limits) - self._seconds_since_return())
            delay = min(left + _CLOCK_TOLERANCE, _CHECK_INTERVAL)
            self._last_check = time.perf_counter()
            self._next_check = self._last_check + delay
            self._alarm = asyncio.get_running_loop().call_later(delay, self._check)

    def _check(self) -> None:
        if self.stuck_seconds:
            self._next_check = math.inf
            self._on_stuck()
        else:
            self._set_alarm()


class OverdueAlarm:
    """Fails each job of a forward when its time limit is over: its own, or that of the batch.

    The time starts at `get_start()`, which returns 0 until the device has begun. It is called only
    when a limit may be over, so that the device thread need not wake the event loop. The forward
    itself cannot be stopped and occupies the device until it returns. `get_limit` returns the limit
    of a batch, and `get_stopped_seconds` the time for which the process was stopped, which does not
    count.
    """

    def __init__(
        self,
        get_batch: Callable[[], Batch],
        get_start: Callable[[], float],
        get_limit: Callable[[Batch], float],
        get_stopped_seconds: Callable[[float], float],
    ) -> None:
        self._get_batch, self._get_start, self._get_limit = get_batch, get_start, get_limit
        self._get_stopped_seconds = get_stopped_seconds
        self._check()

    def cancel(self) -> None:
        """Fail no more jobs, because the forward has returned."""
        self._alarm.cancel()

    def _check(self) -> None:
        start, batch, left = self._get_start(), self._get_batch(), list[float]()
        elapsed = 0.0
        if start:
            elapsed = time.perf_counter() - start - self._get_stopped_seconds(start)
        batch_limit = self._get_limit(batch)
        for job in (part.job for part in batch.slices):
            limit = batch_limit
            if job.time_limit is not None:
                limit = job.time_limit - job.time_spent - job.inference_seconds
            if not start or limit - elapsed > _CLOCK_RESOLUTION:
                left.append(limit - elapsed)
                continue
            subject, seconds, setting = "forwards", job.time_limit, "RERANK_GPU_TIMEOUT"
            if seconds is None:
                subject, seconds, setting = "forward", limit, "GPU_PROCESS_TIMEOUT"
            message = f"the {subject} took longer than {seconds:g} seconds ({setting})"
            job.fail(InferenceTimeoutError(message))
        if left:
            delay = max(min(left), 0.0 if start else _CLOCK_TOLERANCE)
            self._alarm = asyncio.get_running_loop().call_later(delay, self._check)


class TokenBudget:
    """The limits of a forward: halved after an out-of-memory error, then slowly restored."""

    def __init__(
        self, tokens: int, max_sequences: int | None = None, max_requests: int | None = None
    ) -> None:
        self._max_tokens = tokens
        self.limits = BatchLimits(tokens, max_sequences, max_requests)

    def shrink(self, failed_tokens: int) -> None:
        """Lower the budget to half of `failed_tokens`, which did not fit into the memory."""
        lowered = max(1, min(self.limits.max_tokens, failed_tokens // 2))
        self.limits = replace(self.limits, max_tokens=lowered)

    def recover(self) -> None:
        """Raise the budget by a hundredth of its maximum, after a forward that fitted."""
        if self.limits.max_tokens < self._max_tokens:
            raised = self.limits.max_tokens + max(1, self._max_tokens // _RECOVERY_STEPS)
            self.limits = replace(self.limits, max_tokens=min(self._max_tokens, raised))


@dataclass(slots=True, eq=False)
class MeasuredModel:
    """A model on a device: `replica` is the model that runs there.

    `budget` holds the limits of its forwards, `seconds_per_token` was measured at startup, and
    `rate` is measured by its forwards.
    """

    replica: Model
    budget: TokenBudget
    seconds_per_token: float = 0.0
    rate: ServiceRate = field(default_factory=ServiceRate)
