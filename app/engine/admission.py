"""Admission: a place in the queue first, then tokenisation off the event loop, then a job."""

import asyncio
import time
from concurrent.futures import Executor
from dataclasses import dataclass

from app.engine.queue import JobQueue
from app.jobs import Job, Model, Outputs, TokenizedText
from app.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request's work for one model, lined up, and how it was tokenised."""

    job: Job
    texts: list[TokenizedText]
    tokenize_seconds: float


class Admission:
    """Turns requests into jobs, as many as the queue has places for."""

    def __init__(self, queue: JobQueue, threads: Executor, metrics: Metrics) -> None:
        self._queue = queue
        self._threads = threads
        self._metrics = metrics

    async def admit(self, model: Model, texts: list[str], outputs: Outputs) -> Admitted:
        """Line up one job and return once all of it has gone to the device, or it has failed.

        What is left of it when the caller is cancelled is taken out of the queue.
        """
        async with self._queue.place():
            admitted = await self._line_up(model, texts, outputs)
            await self._departure(admitted.job)
        return admitted

    async def _line_up(self, model: Model, texts: list[str], outputs: Outputs) -> Admitted:
        started = time.perf_counter()
        loop = asyncio.get_running_loop()
        tokenized = await loop.run_in_executor(self._threads, model.tokenize, texts)
        now = time.perf_counter()
        self._metrics.tokenize.observe(now - started)
        job = Job(model, [text.ids for text in tokenized], outputs, loop.create_future(), now)
        self._queue.put(job)
        return Admitted(job, tokenized, now - started)

    async def _departure(self, job: Job) -> None:
        try:
            await job.departed.wait()
        finally:
            self._queue.discard(job)
