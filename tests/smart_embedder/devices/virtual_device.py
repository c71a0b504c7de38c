"""A device in virtual time: its forwards take seconds that a test sets, and nobody waits."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from app.http_metrics import Metrics
from smart_embedder.devices.executor import DeviceExecutor
from smart_embedder.devices.forward_limits import ForwardLimit, Served, TokenBudget
from smart_embedder.scheduling.job import Job
from smart_embedder.scheduling.queue import JobQueue
from tests.smart_embedder.fakes import FakeModel
from tests.smart_embedder.scheduling.jobs import job
from tests.support.skipped_time import now


class VirtualThread:
    """One call after the other; a call takes `seconds_of` it, and preempting ones go between."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self._lock = asyncio.Lock()
        self.calls = 0

    async def run(self, call: Callable[[], Any], *, preempts: bool = False) -> Any:
        if preempts:
            return await self._run(call)
        async with self._lock:
            return await self._run(call)

    async def _run(self, call: Callable[[], Any]) -> Any:
        self.calls += 1
        try:
            return call()
        finally:
            await asyncio.sleep(self.seconds)

    async def close(self, seconds: float) -> None:
        """It has no thread."""


class VirtualDevice:
    """An executor with its queue; as a GPU it computes one batch while the next is launched."""

    def __init__(
        self,
        seconds: float,
        *models: FakeModel,
        gpu: bool = False,
        budget: int = 10,
        seconds_per_token: float = 0.0,
        fixed: float | None = None,
        batch_wait: float = 0.0,
    ) -> None:
        self.models = models or (FakeModel(),)
        self.queue, self.metrics = JobQueue(), Metrics()
        # Launching takes no time; a CPU computes in that call.
        launching = VirtualThread(0.0 if gpu else seconds)
        collecting = VirtualThread(seconds) if gpu else None
        self.thread = collecting or launching
        served = {
            model: Served(model, TokenBudget(budget), seconds_per_token) for model in self.models
        }
        self.budgets = {model: each.budget for model, each in served.items()}
        self.lost, self.freed = list[float](), list[int]()
        self.executor = DeviceExecutor(
            "device",
            self.queue,
            launching,
            collecting,
            limit=ForwardLimit(fixed, 30.0),
            metrics=self.metrics,
            free_memory=lambda: self.freed.append(len(self.models[0].batches)),
            models=served,
            batch_wait=batch_wait,
            on_lost=lambda: self.lost.append(now()),
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator["VirtualDevice"]:
        task = asyncio.create_task(self.executor.run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.wait({task})

    @property
    def model(self) -> FakeModel:
        return self.models[0]

    def put(self, *lengths: int, model: FakeModel | None = None, **options: Any) -> Job:
        """A job of texts of so many tokens, for the first model if none is named."""
        made = job(*lengths, model=model or self.model, **options)
        self.queue.put(made)
        return made

    async def compute(self, *lengths: int, **options: Any) -> list[int]:
        """The results of such a job, as numbers."""
        return numbers(await self.put(*lengths, **options).result())


def numbers(results: Sequence[Any]) -> list[int]:
    return [int(np.asarray(each.dense)[0]) for each in results]
