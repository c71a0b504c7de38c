"""A batch that a device works on."""

import asyncio
from dataclasses import dataclass, field

from app.engine import clock
from app.engine.scheduling.batch import Batch


@dataclass(slots=True, eq=False)
class Forward:
    """One forward of a batch, or of a half of it after memory ran out.

    In the device's thread `batch` is left without the requests that have their outcome by then, and
    `begun` is set. `device_free` is what the forward launched before it has as `returned`, which is
    set once the device has computed it.
    """

    batch: Batch
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    device_free: asyncio.Event | None = None
    returned: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class InFlight:
    """A batch that was taken from the queue and is not completed yet.

    `device_free` is set when the batch before it is completed. `began` is when the device began it
    (0 before it is launched), or the last half of it after memory ran out, and `first_began` when
    it was launched as a whole. `preempted_seconds` is how long batches that preempted it had the
    device since `began`. `expected_seconds` are those of its forward.
    """

    batch: Batch
    device_free: asyncio.Event
    preempts: "InFlight | None" = None
    expected_seconds: float = 0.0
    launched: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    began: float = 0.0
    first_began: float = 0.0
    preempted_seconds: float = 0.0

    @property
    def seconds_left(self) -> float:
        """Seconds until the device has computed it, about."""
        if not self.began:
            return self.expected_seconds
        elapsed = clock.now() - self.began
        # A forward that takes longer than expected is expected to take half as long again.
        return self.expected_seconds - elapsed if elapsed < self.expected_seconds else elapsed / 2

    def begin(self) -> None:
        """Note that the device begins it, or the next half of it."""
        self.began, self.preempted_seconds = clock.now(), 0.0
        self.first_began = self.first_began or self.began
