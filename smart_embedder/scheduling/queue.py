"""The jobs that wait for the device, fair between classes, clients and jobs.

The batcher chooses among them by the counts that the queue keeps. A group's clock advances by the
tokens served in it, divided by the weights that wait there, and is never below its least node; a
node that begins to wait starts at the clock, or at its own count if that is greater. Before each
batch no waiting node counts more than the largest forward above the least of its group. When
nothing waits, all is forgotten.

On a CPU, short jobs may preempt a long forward between its layers.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import count, pairwise

from smart_embedder.errors import SmartEmbedderError
from smart_embedder.interface import Model
from smart_embedder.requests import Purpose
from smart_embedder.scheduling.batcher import (
    BULK_WEIGHT,
    INTERACTIVE_WEIGHT,
    Batch,
    BatchSlice,
    LimitsOf,
    Node,
    Path,
    form_batch,
)
from smart_embedder.scheduling.job import Job


class JobQueue:
    """Jobs that wait for the device. To be used from the event loop's thread only."""

    def __init__(self) -> None:
        self._jobs: dict[Job, Path] = {}
        self._consumers: list[QueueConsumer] = []
        self._handed_over: deque[Batch] = deque()
        self._closed_for: SmartEmbedderError | None = None
        self._largest_forward = 0
        self._arrivals = count()
        self._forget()

    def _forget(self) -> None:
        """Begin all counts anew: nobody is ahead of anybody."""
        self._root = Node(0)
        self._classes = {False: Node(0, INTERACTIVE_WEIGHT), True: Node(1, BULK_WEIGHT)}
        self._clients: dict[tuple[bool, str], Node] = {}

    @property
    def waiting_tokens(self) -> int:
        """Tokens that wait for the device."""
        waiting = sum(job.waiting_tokens for job in self._jobs)
        return waiting + sum(batch.tokens for batch in self._handed_over)

    @property
    def jobs(self) -> list[Job]:
        """The jobs that wait, in order of arrival."""
        return list(self._jobs)

    def tokens_before_place(self, purpose: Purpose, last: int = 0) -> int:
        """About how many tokens are taken until the first job of this purpose has `last` tokens.

        It is the job with the fewest; meanwhile each other job is served as much.
        """
        waiting = [job.waiting_tokens for job in self._jobs if job.purpose is purpose]
        own = max(0, min(waiting, default=0) - last)
        return min(own * len(self._jobs), self.waiting_tokens)

    def consumer(self, serves: Callable[[Model], bool]) -> "QueueConsumer":
        """A view for a device that serves these models."""
        consumer = QueueConsumer(self, serves)
        self._consumers.append(consumer)
        return consumer

    def is_served(self, model: Model) -> bool:
        """Whether a device that has not failed computes this model."""
        return any(each.serves(model) for each in self._consumers)

    def put(self, job: Job) -> None:
        """Add a job; if the queue is closed the job fails with the reason."""
        if self._closed_for is not None:
            job.fail(self._closed_for)
            return
        client = self._clients.setdefault((job.is_bulk, job.client), Node(next(self._arrivals)))
        path = Path(self._root, self._classes[job.is_bulk], client, Node(next(self._arrivals)))
        for parent, node in pairwise(path):
            if not node.jobs:
                node.served = max(node.served, parent.clock)
                parent.waiting_weight += node.weight
            node.jobs += 1
        self._jobs[job], job.leave_queue = path, self._leave
        serving = [each for each in self._consumers if each.serves(job.model)]
        idle = [each for each in serving if each.idle]
        for consumer in idle or serving:
            if consumer.idle:
                consumer.arrival.set()
            elif consumer.on_arrival is not None:
                consumer.on_arrival(job)

    def hand_over(self, batch: Batch) -> None:
        """Put back a batch whose device has failed; it is the first to be taken."""
        if self._closed_for is not None:
            batch.fail(self._closed_for)
            return
        self._handed_over.append(batch)
        for consumer in self._consumers:
            if consumer.serves(batch.model):
                consumer.arrival.set()

    def fail(self, error: SmartEmbedderError, of: Callable[[Model], bool] = lambda _: True) -> None:
        """Fail every waiting job whose model `of` accepts."""
        for job in [job for job in self._jobs if of(job.model)]:
            job.fail(error)
        for batch in [batch for batch in self._handed_over if of(batch.model)]:
            self._handed_over.remove(batch)
            batch.fail(error)

    def close(self, error: SmartEmbedderError) -> None:
        """Fail every job that waits, and every later one."""
        self._closed_for = error
        self.fail(error)

    def has_work(self, serves: Callable[[Model], bool]) -> bool:
        """Whether a job waits whose model `serves` accepts."""
        return any(serves(job.model) for job in self._jobs) or any(
            serves(batch.model) for batch in self._handed_over
        )

    def take(
        self,
        limits_of: LimitsOf,
        serves: Callable[[Model], bool] = lambda _: True,
        among: Iterable[Job] | None = None,
    ) -> Batch | None:
        """Remove and return the next batch; None if no job waits that `serves` accepts.

        Chooses from the jobs in `among`, or from all; from all, a batch that was handed over is
        first.
        """
        for handed_over in list(self._handed_over) if among is None else ():
            if serves(handed_over.model):
                self._handed_over.remove(handed_over)
                # Fairness counted it when it was first taken.
                if (unresolved := handed_over.unresolved()).slices:
                    return unresolved
        candidates = self._jobs if among is None else among
        jobs = {job: self._jobs[job] for job in candidates if serves(job.model)}
        if not jobs:
            return None
        if len(self._jobs) == 1 and (batch := self._whole(next(iter(jobs)), limits_of)) is not None:
            return batch
        self._limit_leads(jobs, limits_of)
        batch = form_batch(jobs, limits_of, self._largest_forward)
        self._take_out(batch)
        return batch

    def _whole(self, job: Job, limits_of: LimitsOf) -> Batch | None:
        """All that is left of the only job that waits, if it fits; nobody is ahead of anybody."""
        limits, stop = limits_of(job.model), len(job.sequences)
        most = min(limits.max_sequences or stop, job.model.max_batch_sequences or stop)
        if job.waiting_tokens > limits.max_tokens or stop - job.taken > most:
            return None
        batch = Batch(job.model, [BatchSlice(job, job.taken, stop)])
        job.take(stop - job.taken, time.perf_counter())
        return batch

    def _limit_leads(self, jobs: Mapping[Job, Path], limits_of: LimitsOf) -> None:
        """Let no node count more than the largest forward above the least of its group.

        Otherwise the work that another device does for a client, or that preempts a forward, would
        be held against the client for as long as it took.
        """
        limits = (limits_of(model).max_tokens for model in {job.model for job in jobs})
        self._largest_forward = max(self._largest_forward, *limits)
        groups: dict[Node, set[Node]] = {}
        for path in jobs.values():
            for parent, node in pairwise(path):
                groups.setdefault(parent, set()).add(node)
        for nodes in groups.values():
            most = min(node.served for node in nodes) + self._largest_forward
            for node in nodes:
                node.served = min(node.served, most)

    def _take_out(self, batch: Batch) -> None:
        """Take its sequences, and charge each node on their paths."""
        self._largest_forward = max(self._largest_forward, batch.tokens)
        for part in batch.slices:
            for parent, node in pairwise(self._jobs[part.job]):
                node.served += part.tokens / node.weight
                parent.clock += part.tokens / parent.waiting_weight
        now = time.perf_counter()
        for part in batch.slices:
            part.job.take(part.count, now)
        least: dict[Node, float] = {}
        for path in self._jobs.values():
            for parent, node in pairwise(path):
                least[parent] = min(least.get(parent, math.inf), node.served)
        for parent, served in least.items():
            parent.clock = max(parent.clock, served)
        for (is_bulk, name), client in list(self._clients.items()):
            if not client.jobs and client.served <= self._classes[is_bulk].clock:
                del self._clients[is_bulk, name]

    def _leave(self, job: Job) -> None:
        for parent, node in pairwise(self._jobs.pop(job)):
            node.jobs -= 1
            if not node.jobs:
                parent.waiting_weight -= node.weight
        if not self._jobs:
            self._forget()


class QueueConsumer:
    """One device's view of the queue: the jobs of the models that it `serves`.

    While no device is idle, `on_arrival` is called for each job that arrives.
    """

    def __init__(self, queue: JobQueue, serves: Callable[[Model], bool]) -> None:
        self.queue = queue
        self.serves = serves
        self.arrival = asyncio.Event()
        self.on_arrival: Callable[[Job], None] | None = None
        self.idle = False

    async def wait(self) -> None:
        """Wait for work."""
        self.idle = True
        try:
            while not self.queue.has_work(self.serves):
                self.arrival.clear()
                await self.arrival.wait()
        finally:
            self.idle = False
