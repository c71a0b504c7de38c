"""The queue of jobs that wait for a device; fair between classes, clients and jobs.

The queue counts the tokens that each node of its tree was served, and the batcher chooses jobs by
these counts. The clock of a parent advances by the tokens served below it, divided by the total
weight of its waiting children, and is never below the lowest count of a waiting child. A node that
starts to wait gets the count of the clock, or keeps its own count if that is higher. Before each
batch, counts are lowered so that no waiting node is more than the largest forward above the lowest
of its siblings. When the queue is empty, all counts are reset.

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
    TreePath,
    form_batch,
)
from smart_embedder.scheduling.job import Job


class JobQueue:
    """A fair queue of jobs. Call its methods in the event loop's thread only."""

    def __init__(self) -> None:
        self._jobs: dict[Job, TreePath] = {}
        self._consumers: list[QueueConsumer] = []
        self._handed_over: deque[Batch] = deque()
        self._closed_for: SmartEmbedderError | None = None
        self._largest_forward = 0
        self._arrivals = count()
        self._reset_counts()

    def _reset_counts(self) -> None:
        self._root = Node(0)
        self._classes = {False: Node(0, INTERACTIVE_WEIGHT), True: Node(1, BULK_WEIGHT)}
        self._clients: dict[tuple[bool, str], Node] = {}

    @property
    def waiting_tokens(self) -> int:
        """The number of tokens that wait for a device."""
        waiting = sum(job.waiting_tokens for job in self._jobs)
        return waiting + sum(batch.tokens for batch in self._handed_over)

    @property
    def jobs(self) -> list[Job]:
        """The waiting jobs, in order of arrival."""
        return list(self._jobs)

    def estimate_tokens_ahead(self, purpose: Purpose, last: int = 0) -> int:
        """Estimate the tokens taken until a job of this purpose has at most `last` tokens left.

        This is the job with the fewest tokens; all other jobs are served equally in the meantime.
        """
        waiting = [job.waiting_tokens for job in self._jobs if job.purpose is purpose]
        tokens = max(0, min(waiting, default=0) - last)
        return min(tokens * len(self._jobs), self.waiting_tokens)

    def add_consumer(self, serves: Callable[[Model], bool]) -> "QueueConsumer":
        """Add a consumer for a device that serves these models."""
        consumer = QueueConsumer(self, serves)
        self._consumers.append(consumer)
        return consumer

    def is_served(self, model: Model) -> bool:
        """Return True if a device that has not failed serves this model."""
        return any(consumer.serves(model) for consumer in self._consumers)

    def put(self, job: Job) -> None:
        """Add a job. If the queue is closed, the job fails with the error given to `close`."""
        if self._closed_for is not None:
            job.fail(self._closed_for)
            return
        new = Node(next(self._arrivals), job.client_weight)
        client = self._clients.setdefault((job.is_bulk, job.client), new)
        path = TreePath(self._root, self._classes[job.is_bulk], client, Node(next(self._arrivals)))
        for parent, node in pairwise(path):
            if not node.jobs:
                node.served = max(node.served, parent.clock)
                parent.waiting_weight += node.weight
            node.jobs += 1
        self._jobs[job], job.leave_queue = path, self._leave
        serving = [consumer for consumer in self._consumers if consumer.serves(job.model)]
        idle = [consumer for consumer in serving if consumer.idle]
        for consumer in idle or serving:
            if consumer.idle:
                consumer.arrival.set()
            elif consumer.on_arrival is not None:
                consumer.on_arrival(job)

    def hand_over(self, batch: Batch) -> None:
        """Put back a batch whose device has failed; it is taken before all other jobs."""
        if self._closed_for is not None:
            batch.fail(self._closed_for)
            return
        self._handed_over.append(batch)
        for consumer in self._consumers:
            if consumer.serves(batch.model):
                consumer.arrival.set()

    def fail(self, error: SmartEmbedderError, of: Callable[[Model], bool] = lambda _: True) -> None:
        """Fail the waiting jobs of the models for which `of` returns True."""
        for job in [job for job in self._jobs if of(job.model)]:
            job.fail(error)
        for batch in [batch for batch in self._handed_over if of(batch.model)]:
            self._handed_over.remove(batch)
            batch.fail(error)

    def close(self, error: SmartEmbedderError) -> None:
        """Fail all waiting jobs, and every job that is added later."""
        self._closed_for = error
        self.fail(error)

    def has_work(self, serves: Callable[[Model], bool]) -> bool:
        """Return True if a job waits whose model is served."""
        return any(serves(job.model) for job in self._jobs) or any(
            serves(batch.model) for batch in self._handed_over
        )

    def take(
        self,
        limits_of: LimitsOf,
        serves: Callable[[Model], bool] = lambda _: True,
        among: Iterable[Job] | None = None,
    ) -> Batch | None:
        """Remove and return the next batch; None if no job waits whose model is served.

        Chooses from the jobs in `among`. Without `among`, chooses from all jobs, after the batches
        that were handed over.
        """
        for handed_over in list(self._handed_over) if among is None else ():
            if serves(handed_over.model):
                self._handed_over.remove(handed_over)
                # Its tokens were counted when it was taken for the first time.
                if (unresolved := handed_over.drop_resolved()).slices:
                    return unresolved
        candidates = self._jobs if among is None else among
        jobs = {job: self._jobs[job] for job in candidates if serves(job.model)}
        if not jobs:
            return None
        if len(self._jobs) == 1:
            batch = self._take_whole_job(next(iter(jobs)), limits_of)
            if batch is not None:
                return batch
        self._limit_leads(jobs, limits_of)
        batch = form_batch(jobs, limits_of, self._largest_forward)
        self._take_out(batch)
        return batch

    def _take_whole_job(self, job: Job, limits_of: LimitsOf) -> Batch | None:
        """Take the rest of the only waiting job, if it fits into one batch.

        Nothing is counted, because the counts are reset when the job leaves.
        """
        limits, stop = limits_of(job.model), len(job.sequences)
        max_sequences = min(limits.max_sequences or stop, job.model.max_batch_sequences or stop)
        if job.waiting_tokens > limits.max_tokens or stop - job.taken > max_sequences:
            return None
        batch = Batch(job.model, [BatchSlice(job, job.taken, stop)])
        job.take(stop - job.taken, time.perf_counter())
        return batch

    def _limit_leads(self, jobs: Mapping[Job, TreePath], limits_of: LimitsOf) -> None:
        """Lower counts that are more than the largest forward above the lowest of their siblings.

        Without this limit, a client that another device has served, or whose jobs preempted a
        forward, would have to wait until all others were served as much.
        """
        limits = (limits_of(model).max_tokens for model in {job.model for job in jobs})
        self._largest_forward = max(self._largest_forward, *limits)
        siblings: dict[Node, set[Node]] = {}
        for path in jobs.values():
            for parent, node in pairwise(path):
                siblings.setdefault(parent, set()).add(node)
        for nodes in siblings.values():
            max_served = min(node.served for node in nodes) + self._largest_forward
            for node in nodes:
                node.served = min(node.served, max_served)

    def _take_out(self, batch: Batch) -> None:
        """Take the sequences of the batch, and charge the nodes on the paths of their jobs."""
        self._largest_forward = max(self._largest_forward, batch.tokens)
        for part in batch.slices:
            for parent, node in pairwise(self._jobs[part.job]):
                node.served += part.tokens / node.weight
                parent.clock += part.tokens / parent.waiting_weight
        now = time.perf_counter()
        for part in batch.slices:
            part.job.take(part.count, now)
        lowest: dict[Node, float] = {}
        for path in self._jobs.values():
            for parent, node in pairwise(path):
                lowest[parent] = min(lowest.get(parent, math.inf), node.served)
        for parent, served in lowest.items():
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
            self._reset_counts()


class QueueConsumer:
    """Waits for jobs of the models that a device `serves`.

    While no device that serves its model is idle, `on_arrival` is called with each new job.
    """

    def __init__(self, queue: JobQueue, serves: Callable[[Model], bool]) -> None:
        self.queue = queue
        self.serves = serves
        self.arrival = asyncio.Event()
        self.on_arrival: Callable[[Job], None] | None = None
        self.idle = False

    async def wait(self) -> None:
        """Wait until there is work for the device."""
        self.idle = True
        try:
            while not self.queue.has_work(self.serves):
                self.arrival.clear()
                await self.arrival.wait()
        finally:
            self.idle = False
