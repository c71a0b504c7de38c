"""Preemption: short jobs run between the layers of a long forward on a CPU."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from smart_embedder.interface import Model
from smart_embedder.scheduling.batcher import Batch, BatchSlice, Limits, LimitsOf
from smart_embedder.scheduling.job import Job
from smart_embedder.scheduling.queue import QueueConsumer

# Tokens of one batch that preempts, since the forward waits for its end.
_MOST_TOKENS = 256
# Jobs of similar length would gain nothing.
_TIMES_SHORTER = 8
# A text of fewer tokens takes as long, because its forward reads all weights, too.
_LEAST_TOKENS = 12
# Seconds; a shorter forward is not preempted. A lone text would wait for one of 40 ms whenever
# requests of many texts end up alone in a batch: nine times as long as on a quiet machine.
WORTH_PREEMPTING = 0.01


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

    False for a bulk job where a job in `batch` is interactive.
    """
    if job.is_bulk and not all(part.job.is_bulk for part in batch.slices):
        return False
    tokens, clients = max(tokens, _LEAST_TOKENS), batch.client_tokens
    own = max(tokens, clients.get(job.client, 0))
    others = max((share for client, share in clients.items() if client != job.client), default=0)
    return others >= _TIMES_SHORTER * own or any(
        each.job.client == job.client and each.tokens >= _TIMES_SHORTER * tokens
        for each in batch.slices
    )
