"""The waiting room: bounded, fair, and emptied batch by batch."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from app.engine.batcher import Limits, form_batch
from app.errors import QueueFullError
from app.jobs import Batch, Job


class JobQueue:
    """Jobs that wait for the device, and at most `capacity` requests that they belong to.

    A request takes a place before it costs anything and keeps it while any of its sequences waits.
    All methods belong to the event loop's thread.
    """

    def __init__(self, capacity: int, patience: float) -> None:
        self._capacity = capacity
        self._patience = patience
        self._places = asyncio.Semaphore(capacity)
        self._waiting_requests = 0
        self._jobs: list[Job] = []
        self._arrival = asyncio.Event()
        self._virtual_time = 0.0

    @property
    def waiting_requests(self) -> int:
        """Places taken."""
        return self._waiting_requests

    @property
    def waiting_tokens(self) -> int:
        """Tokens that wait for the device."""
        return sum(len(ids) for job in self._jobs for ids in job.sequences[job.taken :])

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Hold a place; raise `QueueFullError` when none comes free in time."""
        try:
            async with asyncio.timeout(self._patience):
                await self._places.acquire()
        except TimeoutError:
            raise QueueFullError(f"the queue is full: {self._capacity} requests wait") from None
        self._waiting_requests += 1
        try:
            yield
        finally:
            self._waiting_requests -= 1
            self._places.release()

    def put(self, job: Job) -> None:
        """Line up a job."""
        job.virtual_start = self._virtual_time
        self._jobs.append(job)
        self._arrival.set()

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
        self._virtual_time += batch.tokens / len(self._jobs)
        for share in batch.shares:
            share.job.virtual_start += share.tokens
            share.job.taken = share.stop
            if not share.job.waiting:
                self._leave(share.job)
        return batch

    def _leave(self, job: Job) -> None:
        self._jobs.remove(job)
        job.departed.set()
        if not self._jobs:
            self._arrival.clear()
