"""The jobs that wait for the device, fair between clients and between each client's jobs."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from app.engine.batch import Batch
from app.engine.batcher import Flow, Limits, form_batch
from app.engine.job import Job
from app.errors import SmartEmbedderError


class JobQueue:
    """Jobs that wait for the device. To be used from the event loop's thread only."""

    def __init__(self) -> None:
        self._jobs: dict[Job, Flow] = {}
        self._flows: dict[str, Flow] = {}
        self._arrival = asyncio.Event()
        self._idle_consumers = 0
        self._listeners: list[Callable[[Job], None]] = []
        self._virtual_time = 0.0
        self._waiting_tokens = 0
        self._handed_over: deque[Batch] = deque()
        self._closed_for: SmartEmbedderError | None = None

    @property
    def waiting_tokens(self) -> int:
        """Tokens that wait for the device."""
        return self._waiting_tokens + sum(batch.tokens for batch in self._handed_over)

    @property
    def jobs(self) -> list[Job]:
        """The jobs that wait, in order of arrival."""
        return list(self._jobs)

    @contextmanager
    def listener(self, on_arrival: Callable[[Job], None]) -> Iterator[None]:
        """Within the block, `on_arrival` hears of each job that comes while no consumer is idle."""
        self._listeners.append(on_arrival)
        try:
            yield
        finally:
            self._listeners.remove(on_arrival)

    def put(self, job: Job) -> None:
        """Add a job; if the queue is closed the job fails with the reason."""
        if self._closed_for is not None:
            job.fail(self._closed_for)
            return
        flow = self._flows.setdefault(job.client, Flow(self._virtual_time))
        if not flow.jobs:
            flow.virtual_start = max(flow.virtual_start, self._virtual_time)
        flow.jobs += 1
        self._jobs[job] = flow
        self._waiting_tokens += job.waiting_tokens
        job.enter(flow.virtual_time, self._leave)
        self._arrival.set()
        if not self._idle_consumers:
            for on_arrival in self._listeners:
                on_arrival(job)

    def hand_over(self, batch: Batch) -> None:
        """Add a batch that was taken for a device that failed: it is the next to be taken."""
        if self._closed_for is not None:
            batch.fail(self._closed_for)
            return
        self._handed_over.append(batch)
        self._arrival.set()

    def fail(self, error: SmartEmbedderError) -> None:
        """Fail every job that waits."""
        for job in list(self._jobs):
            job.fail(error)
        while self._handed_over:
            self._handed_over.popleft().fail(error)

    def close(self, error: SmartEmbedderError) -> None:
        """Fail every job that waits, and every later one."""
        self._closed_for = error
        self.fail(error)

    async def wait(self) -> None:
        """Wait for a job."""
        self._idle_consumers += 1
        try:
            await self._arrival.wait()
        finally:
            self._idle_consumers -= 1

    def take(self, limits: Limits, among: Iterable[Job] | None = None) -> Batch | None:
        """Remove the next batch, of the jobs `among` those that wait or of all; None if none is.

        Of all, one that was handed over is the first.
        """
        if among is None and (batch := self._take_handed_over()) is not None:
            return batch
        jobs = self._jobs if among is None else {job: self._jobs[job] for job in among}
        if not jobs:
            return None
        batch = form_batch(jobs, limits)
        self._move_virtual_times(batch)
        self._waiting_tokens -= batch.tokens
        batch.take(time.perf_counter())
        self._catch_up()
        return batch

    def _take_handed_over(self) -> Batch | None:
        """The first that somebody still waits for; fairness counted it when it was first taken."""
        found = None
        while found is None and self._handed_over:
            batch = self._handed_over.popleft().unresolved()
            found = batch if batch.slices else None
        self._clear_arrival()
        return found

    def _clear_arrival(self) -> None:
        if not (self._jobs or self._handed_over):
            self._arrival.clear()

    def _move_virtual_times(self, batch: Batch) -> None:
        """Advance by the batch's tokens divided by the weights that shared the device."""
        weights: dict[Flow, float] = {}
        shares: dict[Flow, float] = {}
        for job, flow in self._jobs.items():
            weights[flow] = weights.get(flow, 0.0) + job.weight
            shares[flow] = max(shares.get(flow, 0.0), job.weight)
        for part in batch.slices:
            flow = self._jobs[part.job]
            flow.virtual_start += part.tokens / shares[flow]
            flow.virtual_time += part.tokens / weights[flow]
        self._virtual_time += batch.tokens / sum(shares.values())

    def _catch_up(self) -> None:
        """Advance virtual time to the earliest waiting flow; drop idle flows that it has passed.

        Without this, a client that worked alone for a while would be at a disadvantage later.
        """
        earliest: dict[Flow, float] = {}
        for job, flow in self._jobs.items():
            earliest[flow] = min(earliest.get(flow, job.virtual_start), job.virtual_start)
        for flow, start in earliest.items():
            flow.virtual_time = max(flow.virtual_time, start)
        if earliest:
            first = min(flow.virtual_start for flow in earliest)
            self._virtual_time = max(self._virtual_time, first)
        passed = [
            client
            for client, flow in self._flows.items()
            if not flow.jobs and flow.virtual_start <= self._virtual_time
        ]
        for client in passed:
            del self._flows[client]

    def _leave(self, job: Job) -> None:
        flow = self._jobs.pop(job)
        flow.jobs -= 1
        self._waiting_tokens -= job.waiting_tokens
        self._clear_arrival()
