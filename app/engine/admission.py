"""Admission: tokenisation off the event loop, then jobs in the queue until the device has them."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from app.engine.batcher import weight_of
from app.engine.queue import JobQueue
from app.engine.tokenizer_threads import TokenizerThreads
from app.jobs import Job, Model, Outputs, TokenIds
from app.metrics import Metrics
from app.timings import Stage

Tokens = TypeVar("Tokens")


@dataclass(frozen=True, slots=True)
class Tokenized(Generic[Tokens]):
    """What a tokenizer returned, and when it was at work."""

    value: Tokens
    stage: Stage


class Admission:
    """Turns requests that hold a place into jobs, and sees them off."""

    def __init__(self, queue: JobQueue, threads: TokenizerThreads, metrics: Metrics) -> None:
        self._queue = queue
        self._threads = threads
        self._metrics = metrics

    async def tokenize(
        self, model: Model, call: Callable[[], Tokens], texts: list[str]
    ) -> Tokenized[Tokens]:
        """Run the tokenizer of `model`, which reads `texts`, on a thread of its own."""
        started = time.perf_counter()
        value = await self._threads.run(call, sum(map(len, texts)))
        ended = time.perf_counter()
        self._metrics.tokenize.observe(ended - started)
        return Tokenized(value, Stage("tokenize", started, ended, model.name))

    def make_job(
        self, model: Model, sequences: list[TokenIds], outputs: Outputs, urgency: int
    ) -> Job:
        """A job that waits from now on; `see_off` lines it up."""
        future = asyncio.get_running_loop().create_future()
        weight = weight_of(urgency)
        return Job(model, sequences, outputs, future, time.perf_counter(), weight=weight)

    async def see_off(self, *jobs: Job) -> None:
        """Line up jobs and return once all of them have gone to the device, or have failed.

        What is left of them when the caller is cancelled is taken out of the queue.
        """
        for job in jobs:
            self._queue.put(job)
        try:
            for job in jobs:
                await job.departed.wait()
        except asyncio.CancelledError:
            for job in jobs:
                job.future.cancel()
            raise
        finally:
            for job in jobs:
                self._queue.discard(job)
