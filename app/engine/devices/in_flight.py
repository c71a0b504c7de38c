"""A batch that a device works on."""

import asyncio
from dataclasses import dataclass, field

from app.engine import clock
from app.engine.scheduling.batch import Batch


@dataclass(slots=True, eq=False)
class InFlight:
    """A batch that was taken from the queue and is not completed yet.

    `device_free` is set when the device can begin it: when the batch before it has returned, or,
    for a batch that `preempts` that one, when it starts within it. `began` is when it was launched
    (0 before), or the last part of it after memory ran out, and `first_began` when it was launched
    as a whole. `preempted_seconds` is how long batches that preempted it had the device.
    `expected_seconds` are those of its forward.
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

    def seconds_left(self, device_free_since: float) -> float:
        """Seconds until the device has computed it, about."""
        if not self.began:
            return self.expected_seconds
        elapsed = clock.now() - max(self.began, device_free_since)
        # A forward that takes longer than expected is expected to take half as long again.
        return self.expected_seconds - elapsed if elapsed < self.expected_seconds else elapsed / 2
