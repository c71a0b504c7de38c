"""A device in virtual time: a test sets the seconds of its forwards, and they pass at once."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from app.http_metrics import Metrics
from smart_embedder.devices.executor import DeviceExecutor
from smart_embedder.devices.forward_limits import ForwardLimit, MeasuredModel, TokenBudget
from smart_embedder.scheduling.job import Job
from smart_embedder.scheduling.queue import JobQueue
from tests.smart_embedder.fakes import FakeModel
from tests.smart_embedder.scheduling.jobs import job
from tests.support.skipped_time import now


class VirtualThread:
    """Runs one call after the other, each for `seconds`; preempting calls run at once."""

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
        """Do nothing, because there is no thread."""


class VirtualDevice:
    """An executor with its queue; as a GPU it launches the next batch while it computes one."""

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
        self.budgets = {model: TokenBudget(budget) for model in self.models}
        served = {
            model: MeasuredModel(model, token_budget, seconds_per_token)
            for model, token_budget in self.budgets.items()
        }
        self.unavailable, self.freed = list[float](), list[int]()
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
            on_unavailable=lambda: self.unavailable.append(now()),
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
        """Queue a job of texts with these lengths, for the first model by default."""
        queued = job(*lengths, model=model or self.model, **options)
        self.queue.put(queued)
        return queued

    async def compute(self, *lengths: int, **options: Any) -> list[int]:
        """Queue a job and return its results as numbers."""
        return numbers(await self.put(*lengths, **options).result())


def numbers(results: Sequence[Any]) -> list[int]:
    return [int(np.asarray(embedding.dense)[0]) for embedding in results]
