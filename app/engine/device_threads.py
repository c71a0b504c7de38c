"""Who talks to a device, and how far ahead of its results."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from app.engine.device_thread import DeviceThread

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class DeviceThreads:
    """`launching` begins forwards, `collecting` waits for their results.

    Without `collecting` the device computes while a forward is being launched, as a CPU does. With
    it the next batch is on its way before the results of the last one are back, as suits a GPU.
    """

    launching: DeviceThread
    collecting: DeviceThread | None = None

    @property
    def most_batches(self) -> int:
        """How many batches may be on their way at once."""
        return 1 if self.collecting is None else 2

    async def compute(
        self, launch: Callable[[], Callable[[], Result]], launched: asyncio.Event
    ) -> Result:
        """What that returns which `launch` returns; sets `launched` between the two."""

        def compute_at_once() -> Result:
            return launch()()

        if self.collecting is None:
            return await self.launching.run(compute_at_once)
        collect = await self.launching.run(launch)
        launched.set()
        return await self.collecting.run(collect)

    async def close(self, patience: float) -> None:
        """End both, as `DeviceThread.close`."""
        both = [each for each in (self.launching, self.collecting) if each is not None]
        await asyncio.gather(*(thread.close(patience) for thread in both))
