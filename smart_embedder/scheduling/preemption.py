"""Preemption: on a CPU, short jobs run between the layers of a long forward."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from smart_embedder.interface import Model
from smart_embedder.scheduling.batcher import Batch, BatchLimits, BatchSlice, LimitsOf
from smart_embedder.scheduling.job import Job
from smart_embedder.scheduling.queue import QueueConsumer

# The token limit of a preempting batch: the long forward waits until it has ended.
_MAX_TOKENS = 256
# A job must be this many times shorter; jobs of similar length would gain nothing.
_TIMES_SHORTER = 8
# Shorter texts count as this many tokens: their forward reads all weights too and takes as long.
_MIN_TOKENS = 12
# Forwards of fewer seconds are not preempted. With 40 ms, a single text beside requests of many
# texts would take nine times as long as on a quiet machine.
MIN_PREEMPTED_SECONDS = 0.01


def split_off_short_jobs(batch: Batch) -> tuple[Batch, Batch]:
    """Split off the jobs that are short enough to preempt the others; return them and the rest.

    No job is split off if all short jobs together exceed the token limit of a preempting batch.
    """
    short: list[BatchSlice] = []
    rest: list[BatchSlice] = []
    for part in batch.slices:
        is_whole = part.count == len(part.job.sequences)
        preempts = is_whole and _is_short(part.job, part.tokens, batch)
        (short if preempts else rest).append(part)
    if sum(part.tokens for part in short) > _MAX_TOKENS:
        short, rest = [], batch.slices
    return replace(batch, slices=short), replace(batch, slices=rest)


@dataclass(slots=True, eq=False)
class Preemption:
    """Takes short jobs from the queue of `consumer` while the forward of `batch` runs.

    Preempting batches run one at a time, and together for at most `seconds_left`, initially the
    expected duration of the forward. `start` is called to run a batch; `end` must be called when it
    has ended.
    """

    batch: Batch
    seconds_left: float
    consumer: QueueConsumer
    limits_of: LimitsOf
    start: Callable[[Batch], None]
    running: bool = False

    def begin(self, batch: Batch) -> None:
        """Start `batch`; no other batch is started before it has ended."""
        self.running = True
        self.start(batch)

    def offer(self, jobs: Iterable[Job]) -> None:
        """Start a batch of those jobs that are short enough, unless a batch is running."""
        if self.running or self.seconds_left <= 0:
            return
        short: list[Job] = []
        for job in jobs:
            max_tokens, tokens = self._limits_of(job.model).max_tokens, job.waiting_tokens
            is_new = job.waiting and not job.taken
            if (
                is_new
                and tokens <= max_tokens >= len(job.sequences)
                and _is_short(job, tokens, self.batch)
            ):
                short.append(job)
        batch = self.consumer.queue.take(self._limits_of, self.consumer.serves, short)
        if batch is not None:
            self.begin(batch)

    def end(self, seconds: float) -> None:
        """Record that a batch took `seconds`, and start the next one from the waiting jobs."""
        self.running = False
        self.seconds_left -= seconds
        consumer = self.consumer
        self.offer([job for job in consumer.queue.jobs if consumer.serves(job.model)])

    def _limits_of(self, model: Model) -> BatchLimits:
        limits = self.limits_of(model)
        return replace(limits, max_tokens=min(_MAX_TOKENS, limits.max_tokens))


def _is_short(job: Job, tokens: int, batch: Batch) -> bool:
    """Return True if `job`, with `tokens`, is short enough to preempt `batch`.

    Another client, or another job of the same client, must have far more tokens in the batch. A
    bulk job never preempts interactive jobs.
    """
    if job.is_bulk and not all(part.job.is_bulk for part in batch.slices):
        return False
    tokens, client_tokens = max(tokens, _MIN_TOKENS), batch.client_tokens
    own_tokens = max(tokens, client_tokens.get(job.client, 0))
    other_tokens = max(
        (count for client, count in client_tokens.items() if client != job.client), default=0
    )
    return other_tokens >= _TIMES_SHORTER * own_tokens or any(
        part.job.client == job.client and part.tokens >= _TIMES_SHORTER * tokens
        for part in batch.slices
    )
