"""A batch that a device works on."""

import asyncio
from dataclasses import dataclass, field

from app.engine.scheduling.batch import Batch


@dataclass(slots=True, eq=False)
class InFlight:
    """A batch that was taken from the queue and is not completed yet.

    `device_free` is set when the device can begin it: when the batch before it has returned, or,
    for a batch that `preempts` that one, when it starts within it. `began` is when it was launched
    (0 before), and `preempted_seconds` is how long batches that preempted it had the device.
    """

    batch: Batch
    device_free: asyncio.Event
    preempts: "InFlight | None" = None
    launched: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    began: float = 0.0
    preempted_seconds: float = 0.0
