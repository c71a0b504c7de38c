"""Making room for models: idle ones are unloaded, and busy ones give way in their turn."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from app.engine.devices.device_pool import DevicePool
from app.engine.model_pool.loading_queue import LoadingQueue
from app.engine.model_pool.model_memory import ModelMemory
from app.engine.model_pool.pooled_model import PooledModel
from app.errors import LoadingError

# Seconds between two looks at the memory.
PAUSE = 1.0


class ModelRoom:
    """Frees memory below the threshold, by `unload` and `free_memory`.

    `longest_turn` are the seconds after which a busy model gives way to one that waits, whatever
    its own loading took.
    """

    def __init__(
        self,
        memory: ModelMemory,
        devices: DevicePool,
        queue: LoadingQueue,
        *,
        unload: Callable[[PooledModel], Awaitable[None]],
        free_memory: Callable[[], Awaitable[None]],
        longest_turn: float,
    ) -> None:
        self._memory = memory
        self._devices = devices
        self._queue = queue
        self._unload = unload
        self._free_memory = free_memory
        self._longest_turn = longest_turn
        self._lease_ended = asyncio.Event()

    def note_end_of_lease(self) -> None:
        """A request has ended, so that a model may be idle now."""
        self._lease_ended.set()

    async def make(self, model: PooledModel) -> None:
        """Unload idle models until there is room for this one; wait for those that are busy.

        Raises `ModelTooLargeError` where no waiting helps, `MemoryTakenError` where other programs
        hold the memory, and `LoadingError` where nobody waits for the model any more.
        """
        for memory in model.needs:
            if await self._memory.shortage_for(model, memory) > 0:
                await self._make(model, memory)

    async def _make(self, model: PooledModel, memory: str) -> None:
        # What allocators keep counts as in use, and must neither unload nor refuse a model.
        await self._free_memory()
        has_paused = False
        while (shortage := await self._memory.shortage_for(model, memory)) > 0:
            idle = self.idle(memory)
            busy = [each for each in self._memory.unpinned(memory) if each not in idle]
            enough = self._memory.is_enough(memory, shortage, [*idle, *busy])
            if not has_paused and not (idle and enough):
                # For what a request that has just ended still holds.
                await asyncio.sleep(PAUSE)
                await self._free_memory()
                has_paused = True
                continue
            if not enough:
                others = [*idle, *busy]
                raise await self._memory.refusal_of(model, memory, shortage, others)
            if idle:
                await self._unload(idle[0])
            else:
                await self._wait_for_lease_to_end(model, busy)

    async def wait_until_idle(self, model: PooledModel) -> None:
        """Wait until no request and no batch uses a model that gives way.

        Requests that have waited for its loading use it before.
        """
        while model.is_awaited or self._is_busy(model):
            await self._lease_end(PAUSE)

    async def relieve(self) -> None:
        """Unload idle models while more memory is in use than the threshold allows."""
        for memory in self._memory.in_use:
            if await self._memory.left(memory) < 0:
                await self._free_memory()
            while await self._memory.left(memory) < 0 and (idle := self.idle(memory)):
                await self._unload(idle[0])

    def idle(self, memory: str | None = None) -> list[PooledModel]:
        """The models that may be unloaded, the least recently used first."""
        return [each for each in self._memory.unpinned(memory) if not self._is_busy(each)]

    def _is_busy(self, model: PooledModel) -> bool:
        """Whether a request has it, or a batch whose caller has left."""
        residence = model.residence
        return model.is_held or (residence is not None and self._devices.is_using(residence.model))

    async def _wait_for_lease_to_end(self, model: PooledModel, busy: list[PooledModel]) -> None:
        """Wait until a busy one may be idle; one that has had its turn has to become so."""
        if not model.is_held:
            used_by = ", ".join(each.name for each in busy)
            raise LoadingError(f"the memory for the model {model.name} is in use by {used_by}")
        first = min(busy, key=lambda each: each.turn_left(self._longest_turn))
        left = first.turn_left(self._longest_turn)
        first.gives_way = left <= 0
        self._queue.expect_room(left)
        await self._lease_end(min(left, PAUSE) if left > 0 else PAUSE)

    async def _lease_end(self, most: float) -> None:
        """Wait for a lease to end, at most so long: a batch whose caller has left ends none.

        `asyncio.wait_for` would lose a cancellation at that moment (in Python 3.11), and whoever
        ends the service would wait.
        """
        self._lease_ended.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(most):
                await self._lease_ended.wait()
