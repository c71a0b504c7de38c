"""The jobs that wait for the device, fair between clients and between each client's jobs.

The batcher chooses among them. On a CPU, short jobs may preempt a long forward between its layers.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from smart_embedder.engine import clock
from smart_embedder.engine.model import Model
from smart_embedder.engine.scheduling.batcher import (
    QUANTUM_TOKENS,
    Batch,
    BatchSlice,
    Flow,
    Limits,
    LimitsOf,
    form_batch,
)
from smart_embedder.engine.scheduling.job import Job, Purpose
from smart_embedder.errors import SmartEmbedderError

# Tokens of one batch that preempts, since the forward waits for its end.
_MOST_TOKENS = 256
# Jobs of similar length would gain nothing.
_TIMES_SHORTER = 8
# Seconds; a shorter forward is not preempted.
_WORTH_PREEMPTING = 0.05


class JobQueue:
    """Jobs that wait for the device. To be used from the event loop's thread only."""

    def __init__(self) -> None:
        self._jobs: dict[Job, Flow] = {}
        self._flows: dict[str, Flow] = {}
        self._consumers: list[QueueConsumer] = []
        self._virtual_time = 0.0
        self._most_tokens = 0
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

    def next_to_leave(self, purpose: Purpose) -> "tuple[Job, int] | None":
        """The job of this purpose whose last sequence is taken first, about, if one waits.

        With it, how many tokens are taken before that. As the device is shared equally, first
        between clients, each other client and each other job of its own has taken about as many
        tokens by then as the job itself, or all that it has.
        """
        flows: dict[Flow, list[Job]] = {}
        for job, flow in self._jobs.items():
            flows.setdefault(flow, []).append(job)
        first: tuple[int, Job, Flow] | None = None
        for flow, jobs in flows.items():
            of_purpose = (job for job in jobs if job.purpose is purpose)
            nearest = min(of_purpose, key=_tokens_before_last, default=None)
            if nearest is not None:
                tokens = sum(min(job.waiting_tokens, _tokens_before_last(nearest)) for job in jobs)
                if first is None or tokens < first[0]:
                    first = tokens, nearest, flow
        if first is None:
            return None
        tokens, nearest, own = first
        others = (jobs for flow, jobs in flows.items() if flow is not own)
        shares = (min(tokens, sum(job.waiting_tokens for job in jobs)) for jobs in others)
        return nearest, tokens + sum(shares)

    def consumer(self, serves: Callable[[Model], bool]) -> "QueueConsumer":
        """A view for a device that serves these models."""
        consumer = QueueConsumer(self, serves)
        self._consumers.append(consumer)
        return consumer

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
        serving = [each for each in self._consumers if each.serves(job.model)]
        idle = [each for each in serving if each.idle]
        for consumer in idle:
            consumer.wake()
        for consumer in [] if idle else serving:
            consumer.tell(job)

    def hand_over(self, batch: Batch) -> None:
        """Put back a batch whose device has failed; it is the first to be taken."""
        if self._closed_for is not None:
            batch.fail(self._closed_for)
            return
        self._handed_over.append(batch)
        for consumer in self._consumers:
            if consumer.serves(batch.model):
                consumer.wake()

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
        waits = any(serves(job.model) for job in self._jobs)
        return waits or any(serves(batch.model) for batch in self._handed_over)

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
        if among is None and (batch := self._take_handed_over(serves)) is not None:
            return batch
        candidates = self._jobs if among is None else among
        jobs = {job: self._jobs[job] for job in candidates if serves(job.model)}
        if not jobs:
            return None
        self._bound_leads(jobs, limits_of)
        batch = form_batch(jobs, limits_of)
        self._move_virtual_times(batch)
        self._waiting_tokens -= batch.tokens
        batch.take(clock.now())
        self._catch_up()
        return batch

    def _take_handed_over(self, serves: Callable[[Model], bool]) -> Batch | None:
        """The first one with unresolved jobs; fairness counted it when it was first taken."""
        for batch in [each for each in self._handed_over if serves(each.model)]:
            self._handed_over.remove(batch)
            if (unresolved := batch.unresolved()).slices:
                return unresolved
        return None

    def _bound_leads(self, jobs: Mapping[Job, Flow], limits_of: LimitsOf) -> None:
        """Let no flow, and no job of a flow, be ahead of the last one by more than a forward.

        What is given to one while others wait for the same device never is. Otherwise, what a
        client was given by another device, or as it preempted a forward, would be held against it
        for as long as that took. The least weight that a flow has had counts, as its lead is of
        that time, and for the last one the longest turn, as whoever comes may be more urgent.
        """
        of_flow: dict[Flow, list[Job]] = {}
        for job, flow in jobs.items():
            of_flow.setdefault(flow, []).append(job)
        for flow, own in of_flow.items():
            flow.least_weight = min(flow.least_weight, max(job.weight for job in own))
        limits = (limits_of(model).max_tokens for model in {job.model for job in jobs})
        most = self._most_tokens = max(self._most_tokens, *limits)
        last_flow = min(flow.virtual_start for flow in of_flow)
        last_flow += QUANTUM_TOKENS / min(flow.least_weight for flow in of_flow)
        for flow, own in of_flow.items():
            flow.virtual_start = min(flow.virtual_start, last_flow + most / flow.least_weight)
            last_job = min(job.virtual_start for job in own)
            last_job += QUANTUM_TOKENS / min(job.weight for job in own)
            for job in own:
                job.bound_lead(last_job + most / job.weight)

    def _move_virtual_times(self, batch: Batch) -> None:
        """Advance by the batch's tokens divided by the weights that shared the device."""
        weights: dict[Flow, float] = {}
        shares: dict[Flow, float] = {}
        for job, flow in self._jobs.items():
            weights[flow] = weights.get(flow, 0.0) + job.weight
            shares[flow] = max(shares.get(flow, 0.0), job.weight)
        for batch_slice in batch.slices:
            flow = self._jobs[batch_slice.job]
            flow.virtual_start += batch_slice.tokens / shares[flow]
            flow.virtual_time += batch_slice.tokens / weights[flow]
        self._virtual_time += batch.tokens / sum(shares.values())
        self._most_tokens = max(self._most_tokens, batch.tokens)

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
        if not self._jobs:  # Nobody is ahead of anybody.
            self._flows.clear()


def _tokens_before_last(job: Job) -> int:
    return job.waiting_tokens - len(job.sequences[-1])


class QueueConsumer:
    """One device's view of the queue: the jobs of the models that it `serves`."""

    def __init__(self, queue: JobQueue, serves: Callable[[Model], bool]) -> None:
        self.serves = serves
        self._queue = queue
        self._arrival = asyncio.Event()
        self._on_arrival: Callable[[Job], None] | None = None
        self.idle = False

    @property
    def jobs(self) -> list[Job]:
        """The jobs that wait for it, in order of arrival."""
        return [job for job in self._queue.jobs if self.serves(job.model)]

    @contextmanager
    def listener(self, on_arrival: Callable[[Job], None]) -> Iterator[None]:
        """Within the block, call `on_arrival` for each job that arrives while no device is idle."""
        self._on_arrival = on_arrival
        try:
            yield
        finally:
            self._on_arrival = None

    async def wait(self) -> None:
        """Wait for work."""
        self.idle = True
        try:
            while not self._queue.has_work(self.serves):
                self._arrival.clear()
                await self._arrival.wait()
        finally:
            self.idle = False

    def wake(self) -> None:
        """Make `wait` look for work again."""
        self._arrival.set()

    def tell(self, job: Job) -> None:
        """Pass a job to the listener, if there is one."""
        if self._on_arrival is not None:
            self._on_arrival(job)

    def take(self, limits_of: LimitsOf, among: Iterable[Job] | None = None) -> Batch | None:
        """Remove and return the next batch for this device, as `JobQueue.take`."""
        return self._queue.take(limits_of, self.serves, among)

    def hand_over(self, batch: Batch) -> None:
        """Give a batch back, for another device."""
        self._queue.hand_over(batch)


def is_long(seconds: float) -> bool:
    """Whether a forward of `seconds` is long enough to be preempted."""
    return seconds > _WORTH_PREEMPTING


def split_short(batch: Batch) -> tuple[Batch, Batch]:
    """Split off the jobs that are short beside the others of `batch`; there may be none."""
    short: list[BatchSlice] = []
    rest: list[BatchSlice] = []
    for batch_slice in batch.slices:
        is_whole = batch_slice.count == len(batch_slice.job.sequences)
        preempts = is_whole and _is_short(batch_slice.job, batch_slice.tokens, batch)
        (short if preempts else rest).append(batch_slice)
    if sum(batch_slice.tokens for batch_slice in short) > _MOST_TOKENS:
        short, rest = [], batch.slices
    return replace(batch, slices=short), replace(batch, slices=rest)


@dataclass(slots=True, eq=False)
class Preemption:
    """Takes short jobs from `queue` while the forward of `batch` runs, one batch at a time.

    Together they may take `seconds_left`, at first the seconds of the forward itself. `start` is
    called to run a batch; `ended` must be called after it.
    """

    batch: Batch
    seconds_left: float
    queue: QueueConsumer
    limits_of: LimitsOf
    start: Callable[[Batch], None]
    running: bool = False

    def begin(self, batch: Batch) -> None:
        """Start `batch`; no other is started before it has ended."""
        self.running = True
        self.start(batch)

    def offer(self, jobs: Iterable[Job]) -> None:
        """Start a batch of the jobs that are short enough, unless one is running."""
        if self.running or self.seconds_left <= 0:
            return
        short = [job for job in jobs if self._is_short(job, self._limits_of(job.model).max_tokens)]
        batch = self.queue.take(self._limits_of, short)
        if batch is not None:
            self.begin(batch)

    def ended(self, seconds: float) -> None:
        """Record that a batch took `seconds`, and start the next one from the jobs that wait."""
        self.running = False
        self.seconds_left -= seconds
        self.offer(self.queue.jobs)

    def _limits_of(self, model: Model) -> Limits:
        limits = self.limits_of(model)
        return replace(limits, max_tokens=min(_MOST_TOKENS, limits.max_tokens))

    def _is_short(self, job: Job, most: int) -> bool:
        if not job.waiting or job.taken or len(job.sequences) > most:
            return False
        tokens = job.waiting_tokens
        return tokens <= most and _is_short(job, tokens, self.batch)


def _is_short(job: Job, tokens: int, batch: Batch) -> bool:
    """Whether `batch` has far more tokens of another client, or of another job of this client.

    False if a job in `batch` is more urgent.
    """
    if job.weight < batch.weight:
        return False
    clients = batch.client_tokens
    own = max(tokens, clients.get(job.client, 0))
    others = max((share for client, share in clients.items() if client != job.client), default=0)
    longest = batch.longest_slices.get(job.client, 0)
    return others >= _TIMES_SHORTER * own or longest >= _TIMES_SHORTER * tokens
