"""A batch on its way through a device."""

import asyncio
from dataclasses import dataclass, field

from app.engine.batch import Batch


@dataclass(slots=True, eq=False)
class InFlight:
    """A batch between the queue and its jobs.

    `device_free` is set when the device can begin it: when the batch before is back or, where it
    `preempts` that one, when it is let in. `began` is the time of that, 0 before it, and
    `preempted_seconds` how long others had the device since then.
    """

    batch: Batch
    device_free: asyncio.Event
    preempts: "InFlight | None" = None
    launched: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    began: float = 0.0
    preempted_seconds: float = 0.0
