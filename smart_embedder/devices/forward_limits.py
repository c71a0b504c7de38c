"""What a forward may take: its seconds, with the watchdog of a stuck device, and its tokens."""

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
# At this length a token takes twice as long as in the probe's short sequences, because the cost of
# attention grows with the length (bge-m3 on a CPU; other models and GPUs reach that later).
_DOUBLED_LENGTH = 2048
# The clocks of the event loop and of this module may differ by their resolution.
_CLOCK_TOLERANCE = 0.01
# Seconds between two looks at a forward, and by which a look must be late to show that the process
# was stopped meanwhile.
_STEP = 1.0
# Seconds: less than what can be waited for.
_CLOCK_RESOLUTION = 1e-7
# Forwards that fit, until a token budget that was halved is whole again.
_RECOVERY_STEPS = 100


@dataclass(frozen=True, slots=True)
class ForwardLimit:
    """The most seconds of one forward.

    `fixed` where it is set, else five times the seconds that are predicted for the batch, and at
    least `least`. A job that has its own time limit is held to that instead.
    """

    fixed: float | None
    least: float

    def of_batch(self, batch: Batch, seconds_per_token: float) -> float:
        """Seconds for a whole batch."""
        if self.fixed is not None:
            return self.fixed
        return max(self.least, _SAFETY_FACTOR * predicted_seconds(batch, seconds_per_token))

    def of_device(self, batch: Batch, seconds_per_token: float) -> float:
        """Seconds that the device may take, however much of its time limit a job has left."""
        whole = self.of_batch(batch, seconds_per_token)
        jobs = (each.job for each in batch.slices)
        return max(whole if job.time_limit is None else job.time_limit for job in jobs)


def predicted_seconds(batch: Batch, seconds_per_token: float) -> float:
    """Seconds that a batch takes by the measurement; 0 if nothing was measured."""
    squares = sum(length * length for length in map(len, batch.sequences))
    return (batch.tokens + squares / _DOUBLED_LENGTH) * seconds_per_token


@dataclass(slots=True)
class ServiceRate:
    """A running mean of the tokens per second of a device."""

    tokens_per_second: float = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """Take one forward into account."""
        now = tokens / max(seconds, 1e-9)
        last = self.tokens_per_second or now
        self.tokens_per_second = 0.8 * last + 0.2 * now


class DeviceWatchdog:
    """Measures how long the device has not returned from a forward.

    `on_stuck` is called once no forward has come back for twice as long as one may take. A process
    that is stopped, or whose machine is suspended, computes nothing, and that time does not count:
    the watchdog looks once a second, and all time before a look that comes much later is left out.
    """

    def __init__(self, on_stuck: Callable[[], None]) -> None:
        self._on_stuck = on_stuck
        self._limits: list[float] = []
        self._since = 0.0
        self._alarm: asyncio.TimerHandle | None = None
        self._last_look, self._next_look = 0.0, math.inf
        # From when until when the process was stopped.
        self._stops: list[tuple[float, float]] = []

    @contextmanager
    def over(self, limit: float) -> Iterator[None]:
        """Watch a forward that may take `limit` seconds from the end of the one before it."""
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
        """Seconds since a forward returned, if that is more than twice its limit; else 0."""
        away = self._seconds_away()
        return away if away > 2 * max(self._limits, default=math.inf) else 0.0

    def stopped_since(self, moment: float) -> float:
        """Seconds for which the process was stopped since then, while a forward was watched."""
        stops = self._stops + self._stop_until_now()
        return sum(end - max(start, moment) for start, end in stops if end > moment)

    def _seconds_away(self) -> float:
        return time.perf_counter() - self._since - self.stopped_since(self._since)

    def _stop_until_now(self) -> list[tuple[float, float]]:
        now = time.perf_counter()
        return [(self._last_look, now)] if now - self._next_look > _STEP else []

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._stops += self._stop_until_now()
        self._next_look = math.inf
        if self._limits:
            left = max(0.0, 2 * max(self._limits) - self._seconds_away())
            step = min(left + _CLOCK_TOLERANCE, _STEP)
            self._last_look = time.perf_counter()
            self._next_look = self._last_look + step
            self._alarm = asyncio.get_running_loop().call_later(step, self._look)

    def _look(self) -> None:
        if self.stuck_seconds:
            self._next_look = math.inf
            self._on_stuck()
        else:
            self._set_alarm()


class OverdueAlarm:
    """Fails each job of a forward when `whole` of its batch, or what is left of its own, is over.

    That time begins at `began()`, which is 0 while the device has not begun. It is looked at only
    when a limit may be over, so the device's thread need not wake the event loop to tell it. The
    forward itself cannot be stopped and occupies the device until it returns. `stopped_since` tells
    for how long the process was stopped, which does not count.
    """

    def __init__(
        self,
        forward: Callable[[], Batch],
        began: Callable[[], float],
        whole: Callable[[Batch], float],
        stopped_since: Callable[[float], float],
    ) -> None:
        self._forward, self._began, self._whole = forward, began, whole
        self._stopped_since = stopped_since
        self._look()

    def cancel(self) -> None:
        """Fail no further job: the forward has returned."""
        self._alarm.cancel()

    def _look(self) -> None:
        began, batch, left = self._began(), self._forward(), list[float]()
        elapsed = time.perf_counter() - began - self._stopped_since(began) if began else 0.0
        whole = self._whole(batch)
        for job in (each.job for each in batch.slices):
            limit = whole
            if job.time_limit is not None:
                limit = job.time_limit - job.time_spent - job.inference_seconds
            if not began or limit - elapsed > _CLOCK_RESOLUTION:
                left.append(limit - elapsed)
                continue
            what, seconds, setting = "forwards", job.time_limit, "RERANK_GPU_TIMEOUT"
            if seconds is None:
                what, seconds, setting = "forward", limit, "GPU_PROCESS_TIMEOUT"
            text = f"the {what} took longer than {seconds:g} seconds ({setting})"
            job.fail(InferenceTimeoutError(text))
        if left:
            soonest = max(min(left), 0.0 if began else _CLOCK_TOLERANCE)
            self._alarm = asyncio.get_running_loop().call_later(soonest, self._look)


class TokenBudget:
    """The limits of a forward: halved when a batch ran out of memory, then slowly restored."""

    def __init__(
        self, tokens: int, max_sequences: int | None = None, max_requests: int | None = None
    ) -> None:
        self._most = tokens
        self.limits = BatchLimits(tokens, max_sequences, max_requests)

    def shrink(self, failed_tokens: int) -> None:
        """Lower the budget to half of `failed_tokens`, which did not fit."""
        left = max(1, min(self.limits.max_tokens, failed_tokens // 2))
        self.limits = replace(self.limits, max_tokens=left)

    def recover(self) -> None:
        """Raise the budget by a hundredth of the whole, after a forward that fitted."""
        if self.limits.max_tokens < self._most:
            raised = self.limits.max_tokens + max(1, self._most // _RECOVERY_STEPS)
            self.limits = replace(self.limits, max_tokens=min(self._most, raised))


@dataclass(slots=True, eq=False)
class Served:
    """A model as a device computes it: `runs` is the model itself, or its replica there.

    `budget` is what a forward may hold, `seconds_per_token` what was measured before it served, and
    `rate` what its forwards have shown since then.
    """

    runs: Model
    budget: TokenBudget
    seconds_per_token: float = 0.0
    rate: ServiceRate = field(default_factory=ServiceRate)
