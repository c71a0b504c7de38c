"""The waiting room: fair, and emptied batch by batch."""

import asyncio

from app.engine.batcher import Limits, form_batch
from app.errors import DrainingError
from app.jobs import Batch, Job


class JobQueue:
    """Jobs that wait for the device. All methods belong to the event loop's thread."""

    def __init__(self) -> None:
        self._jobs: list[Job] = []
        self._arrival = asyncio.Event()
        self._virtual_time = 0.0
        self._closed = False

    @property
    def waiting_tokens(self) -> int:
        """Tokens that wait for the device."""
        return sum(len(ids) for job in self._jobs for ids in job.sequences[job.taken :])

    def put(self, job: Job) -> None:
        """Line up a job; raises `DrainingError` once the queue is closed."""
        if self._closed:
            raise DrainingError("the service is shutting down", retry_after=5)
        job.virtual_start = self._virtual_time
        self._jobs.append(job)
        self._arrival.set()

    def close(self) -> list[Job]:
        """Take no job any more; returns those who waited."""
        self._closed = True
        waited = list(self._jobs)
        for job in waited:
            self._leave(job)
        return waited

    def discard(self, job: Job) -> None:
        """Forget what is left of a job that nobody waits for any more."""
        if job in self._jobs:
            self._leave(job)

    async def wait(self) -> None:
        """Return as soon as a job waits."""
        await self._arrival.wait()

    def take(self, limits: Limits) -> Batch | None:
        """Remove the next batch; None where everyone who waited has left."""
        for job in [job for job in self._jobs if job.future.done()]:
            self._leave(job)
        if not self._jobs:
            return None
        batch = form_batch(self._jobs, limits)
        self._virtual_time += batch.tokens / sum(job.weight for job in self._jobs)
        for share in batch.shares:
            share.job.virtual_start += share.tokens / share.job.weight
            share.job.taken = share.stop
            if not share.job.waiting:
                self._leave(share.job)
        return batch

    def _leave(self, job: Job) -> None:
        self._jobs.remove(job)
        job.departed.set()
        if not self._jobs:
            self._arrival.clear()
