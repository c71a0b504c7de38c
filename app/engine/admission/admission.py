"""Admission: tokenize off the event loop, then queue jobs until the device has taken them."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from app.engine import clock
from app.engine.admission.tokenizer_threads import TokenizerThreads
from app.engine.model import Model
from app.engine.scheduling.job import Job
from app.engine.scheduling.queue import JobQueue
from app.observability.metrics import Metrics
from app.observability.tracing import Stage, Timings

Tokens = TypeVar("Tokens")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Tokenized(Generic[Tokens]):
    """The result of a tokenizer, and when it ran."""

    value: Tokens
    stage: Stage


class Admission:
    """Tokenises the texts of requests that hold a permit, and queues their jobs."""

    def __init__(self, queue: JobQueue, threads: TokenizerThreads, metrics: Metrics) -> None:
        self._queue = queue
        self._threads = threads
        self._metrics = metrics

    async def tokenize(
        self, model: Model, call: Callable[[], Tokens], texts: list[str], client: str
    ) -> Tokenized[Tokens]:
        """Run `call`, which tokenises `texts` with the tokenizer of `model`, on another thread."""
        started = clock.now()
        value = await self.run_off_loop(call, texts, client)
        ended = clock.now()
        self._metrics.tokenize.observe(ended - started)
        return Tokenized(value, Stage("tokenize", started, ended, model.name))

    async def run_off_loop(
        self, call: Callable[[], Result], texts: list[str], client: str
    ) -> Result:
        """Run `call`, whose cost grows with the size of `texts`, on a tokenizer thread."""
        return await self._threads.run(call, texts, client)

    async def submit(self, *jobs: Job) -> None:
        """Queue jobs; return when the device has taken all of them, or raise when one fails.

        Cancelling the caller cancels the jobs.
        """
        with ExitStack() as undo:
            undo.callback(_cancel, jobs)
            for job in jobs:
                self._queue.put(job)
            await asyncio.gather(*(job.dequeued() for job in jobs))
            undo.pop_all()

    async def run(self, job: Job) -> list[Any]:
        """Queue a job; return its results, or raise the error that it fails with."""
        await self.submit(job)
        (results,) = await self.results(job)
        return results

    async def results(self, *jobs: Job) -> list[list[Any]]:
        """The results of each job; if one fails, the others are cancelled."""
        try:
            return await asyncio.gather(*(job.result() for job in jobs))
        finally:
            _cancel(jobs)


def _cancel(jobs: Iterable[Job]) -> None:
    for job in jobs:
        job.cancel()


def timings_of(started: float, *, tokenized: Iterable[Stage], jobs: Iterable[Job]) -> Timings:
    """Seconds in each stage until now; `queue` is all time outside tokenizing and forwards."""
    total = clock.now() - started
    tokenized, jobs = tuple(tokenized), tuple(jobs)
    tokenize = sum(stage.ended - stage.began for stage in tokenized)
    inference = sum(job.inference_seconds for job in jobs)
    stages = (*tokenized, *(stage for job in jobs for stage in _stages_of(job)))
    return Timings(tokenize, max(0.0, total - tokenize - inference), inference, total, stages)


def _stages_of(job: Job) -> Iterator[Stage]:
    """The wait for the first forward, and the time from there to the end of the last one."""
    taken, completed, model = job.first_taken_at, job.last_completed_at, job.model.name
    if taken is not None:
        yield Stage("queue", job.enqueued_at, taken, model)
        if completed is not None:
            yield Stage("forward", taken, completed, model, job.inference_seconds)
