"""Cooperative preemption: short jobs run between two parts of a long forward.

A CPU computes one forward at a time, and a request that arrives meanwhile would wait for its end.
Between two layers a model calls `run_preempting_call` of `app.engine.devices.device_threads`, which
can run a batch of short jobs. This module decides which jobs are short, and how many may run.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from app.engine.model import Model
from app.engine.scheduling.batch import Batch, BatchSlice
from app.engine.scheduling.batcher import Limits, LimitsOf
from app.engine.scheduling.job import Job
from app.engine.scheduling.queue import QueueConsumer

# Tokens of one batch that preempts, since the forward waits for its end.
_MOST_TOKENS = 256
# Jobs of similar length would gain nothing.
_TIMES_SHORTER = 8
# Seconds; a shorter forward is not preempted.
_WORTH_PREEMPTING = 0.05


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
