"""The jobs that wait for the device, fair between clients and between each client's jobs.

The batcher chooses among them. On a CPU, short jobs may preempt a long forward between its layers.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

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
# A text of fewer tokens takes as long, because its forward reads all weights, too.
_LEAST_TOKENS = 12
# Seconds; a shorter forward is not preempted. A lone text would wait for one of 40 ms whenever
# requests of many texts end up alone in a batch: nine times as long as on a quiet machine.
WORTH_PREEMPTING = 0.01


class JobQueue:
    """Jobs that wait for the device. To be used from the event loop's thread only."""

    def __init__(self) -> None:
        self._jobs: dict[Job, Flow] = {}
        self._flows: dict[str, Flow] = {}
        self._consumers: list[QueueConsumer] = []
        self._virtual_time = 0.0
        self._most_tokens = 0
        self._handed_over: deque[Batch] = deque()
        self._closed_for: SmartEmbedderError | None = None

    @property
    def waiting_tokens(self) -> int:
        """Tokens that wait for the device."""
        waiting = sum(job.waiting_tokens for job in self._jobs)
        return waiting + sum(batch.tokens for batch in self._handed_over)

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
        flows = _by_flow(self._jobs)
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

    def is_served(self, model: Model) -> bool:
        """Whether a device that has not failed computes this model."""
        return any(each.serves(model) for each in self._consumers)

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
        job.virtual_start, job.leave_queue = flow.virtual_time, self._leave
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
        self._bound_leads(jobs, limits_of)
        batch = form_batch(jobs, limits_of)
        self._take_out(batch)
        return batch

    def _whole(self, job: Job, limits_of: LimitsOf) -> Batch | None:
        """All that is left of the only job that waits, if it fits; nobody is ahead of anybody."""
        limits, stop = limits_of(job.model), len(job.sequences)
        most = min(limits.max_sequences or stop, job.model.max_batch_sequences or stop)
        if job.waiting_tokens > limits.max_tokens or stop - job.taken > most:
            return None
        self._most_tokens = max(self._most_tokens, limits.max_tokens)
        batch = Batch(job.model, [BatchSlice(job, job.taken, stop)])
        job.take(stop - job.taken, time.perf_counter())
        return batch

    def _bound_leads(self, jobs: Mapping[Job, Flow], limits_of: LimitsOf) -> None:
        """Let no flow, and no job of a flow, be ahead of the last one by more than a forward.

        What is given to one while others wait for the same device never is. Otherwise, what a
        client was given by another device, or as it preempted a forward, would be held against it
        for as long as that took. The least weight that a flow has had counts, as its lead is of
        that time, and for the last one the longest turn, as whoever comes may be more urgent.
        """
        of_flow = _by_flow(jobs)
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
                job.virtual_start = min(job.virtual_start, last_job + most / job.weight)

    def _take_out(self, batch: Batch) -> None:
        """Take its sequences; advance by its tokens divided by the weights that share the device.

        Virtual time is then at least that of the earliest flow that waits, and idle flows that it
        has passed are dropped: a client that worked alone for a while is at no disadvantage later.
        """
        waiting = _by_flow(self._jobs)
        shares = {flow: max(job.weight for job in own) for flow, own in waiting.items()}
        sums = {flow: sum(job.weight for job in own) for flow, own in waiting.items()}
        for each in batch.slices:
            flow = self._jobs[each.job]
            flow.virtual_start += each.tokens / shares[flow]
            flow.virtual_time += each.tokens / sums[flow]
        self._virtual_time += batch.tokens / sum(shares.values())
        self._most_tokens = max(self._most_tokens, batch.tokens)
        now = time.perf_counter()
        for each in batch.slices:
            each.job.take(each.count, now)
        left = _by_flow(self._jobs)
        for flow, own in left.items():
            flow.virtual_time = max(flow.virtual_time, min(job.virtual_start for job in own))
        if left:
            first = min(flow.virtual_start for flow in left)
            self._virtual_time = max(self._virtual_time, first)
        for client, flow in list(self._flows.items()):
            if not flow.jobs and flow.virtual_start <= self._virtual_time:
                del self._flows[client]

    def _leave(self, job: Job) -> None:
        flow = self._jobs.pop(job)
        flow.jobs -= 1
        if not self._jobs:  # Nobody is ahead of anybody.
            self._flows.clear()


def _by_flow(jobs: Mapping[Job, Flow]) -> dict[Flow, list[Job]]:
    of_flow: dict[Flow, list[Job]] = {}
    for job, flow in jobs.items():
        of_flow.setdefault(flow, []).append(job)
    return of_flow


def _tokens_before_last(job: Job) -> int:
    return job.waiting_tokens - len(job.sequences[-1])


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


def split_short(batch: Batch) -> tuple[Batch, Batch]:
    """Split off the jobs that are short beside the others of `batch`; there may be none."""
    short: list[BatchSlice] = []
    rest: list[BatchSlice] = []
    for each in batch.slices:
        is_whole = each.count == len(each.job.sequences)
        preempts = is_whole and _is_short(each.job, each.tokens, batch)
        (short if preempts else rest).append(each)
    if sum(each.tokens for each in short) > _MOST_TOKENS:
        short, rest = [], batch.slices
    return replace(batch, slices=short), replace(batch, slices=rest)


@dataclass(slots=True, eq=False)
class Preemption:
    """Takes short jobs of `consumer` while the forward of `batch` runs, one batch at a time.

    Together they may take `seconds_left`, at first the seconds of the forward itself. `start` is
    called to run a batch; `ended` must be called after it.
    """

    batch: Batch
    seconds_left: float
    consumer: QueueConsumer
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
        short: list[Job] = []
        for job in jobs:
            most, tokens = self._limits_of(job.model).max_tokens, job.waiting_tokens
            is_new = job.waiting and not job.taken
            if (
                is_new
                and tokens <= most >= len(job.sequences)
                and _is_short(job, tokens, self.batch)
            ):
                short.append(job)
        batch = self.consumer.queue.take(self._limits_of, self.consumer.serves, short)
        if batch is not None:
            self.begin(batch)

    def ended(self, seconds: float) -> None:
        """Record that a batch took `seconds`, and start the next one from the jobs that wait."""
        self.running = False
        self.seconds_left -= seconds
        consumer = self.consumer
        self.offer([job for job in consumer.queue.jobs if consumer.serves(job.model)])

    def _limits_of(self, model: Model) -> Limits:
        limits = self.limits_of(model)
        return replace(limits, max_tokens=min(_MOST_TOKENS, limits.max_tokens))


def _is_short(job: Job, tokens: int, batch: Batch) -> bool:
    """Whether `batch` has far more tokens of another client, or of another job of this client.

    False if a job in `batch` is more urgent.
    """
    if any(each.job.weight > job.weight for each in batch.slices):
        return False
    tokens, clients = max(tokens, _LEAST_TOKENS), batch.client_tokens
    own = max(tokens, clients.get(job.client, 0))
    others = max((share for client, share in clients.items() if client != job.client), default=0)
    return others >= _TIMES_SHORTER * own or any(
        each.job.client == job.client and each.tokens >= _TIMES_SHORTER * tokens
        for each in batch.slices
    )
