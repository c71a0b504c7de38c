"""The work of one request for one model, as a state machine."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum, auto
from typing import Any, Self

from smart_embedder.errors import InferenceError, SmartEmbedderError
from smart_embedder.interface import Model
from smart_embedder.requests import ClientOptions, Outputs, Purpose
from smart_embedder.results import Stage, Timings
from smart_embedder.tokens import TokenSequence


class JobState(Enum):
    """`WAITING` while sequences are queued, `TAKEN` once all are in batches, then a final state."""

    WAITING = auto()
    TAKEN = auto()
    COMPLETED = auto()
    FAILED = auto()
    CANCELLED = auto()


@dataclass(slots=True, eq=False, repr=False)
class Job:
    """The sequences of one request for one model.

    Devices take the sequences in order, in one or more batches, and compute `outputs` of each. A
    job is interactive, or bulk (`is_bulk`). `time_limit` is the maximum seconds of all its forwards
    together, of which `time_spent` have passed; with None each forward has the limit of its device.
    `reduce`, if set, is called off the event loop with each result, and its return value is kept
    instead.

    The other fields change while the job is processed. `taken` is the number of sequences that are
    in batches, and `waiting_tokens` the number of tokens of the others. `inference_seconds` is the
    duration of all forwards with a part of the job. The queue sets `leave_queue`, which is called
    once, when no sequence waits any more.

    Each transition is a method that changes the state, sets the outcome and leaves the queue. A
    resolved job is in no queue, and is resolved only once. Call all methods in the event loop's
    thread.
    """

    model: Model
    sequences: Sequence[TokenSequence]
    outputs: Outputs
    _: KW_ONLY
    purpose: Purpose = Purpose.EMBEDDING
    client: str = ""
    client_weight: int = 1
    is_bulk: bool = False
    time_limit: float | None = None
    time_spent: float = 0.0
    reduce: Callable[[Any], Any] | None = None
    state: JobState = field(init=False, default=JobState.WAITING)
    taken: int = field(init=False, default=0)
    waiting_tokens: int = field(init=False)
    leave_queue: "Callable[[Job], None] | None" = field(init=False, default=None)
    enqueued_at: float = field(init=False)
    first_taken_at: float | None = field(init=False, default=None)
    last_completed_at: float | None = field(init=False, default=None)
    inference_seconds: float = field(init=False, default=0.0)
    _finished: int = field(init=False, default=0)
    _results: list[Any] = field(init=False)
    _error: SmartEmbedderError | None = field(init=False, default=None)
    _dequeued: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _resolved: asyncio.Event = field(init=False, default_factory=asyncio.Event)

    @classmethod
    def of(
        cls,
        request: ClientOptions,
        model: Model,
        sequences: Sequence[TokenSequence],
        outputs: Outputs,
        **options: Any,
    ) -> Self:
        """Create a job for the client of a request, and as interactive as the request."""
        job = cls(model, sequences, outputs, **options)
        job.client, job.client_weight = request.client, request.client_weight
        job.is_bulk = request.is_bulk
        return job

    def __post_init__(self) -> None:
        self.enqueued_at = time.perf_counter()
        self._results = [None] * len(self.sequences)
        self.waiting_tokens = sum(map(len, self.sequences))

    @property
    def waiting(self) -> bool:
        """True while sequences of the job wait for a device."""
        return self.state is JobState.WAITING

    @property
    def resolved(self) -> bool:
        """True once the job is in a final state."""
        return self._resolved.is_set()

    def take(self, count: int, now: float) -> None:
        """Mark the next `count` sequences as taken by a device."""
        self.waiting_tokens -= sum(map(len, self.sequences[self.taken : self.taken + count]))
        self.taken += count
        if self.first_taken_at is None:
            self.first_taken_at = now
        if self.taken == len(self.sequences):
            self._end_wait(JobState.TAKEN)

    def complete(self, start: int, results: Sequence[Any], seconds: float) -> None:
        """Store the results of the sequences from `start` on; their forward took `seconds`.

        If a result is an error, the job fails with it.
        """
        if self.resolved:
            return
        self._results[start : start + len(results)] = results
        self._finished += len(results)
        self.inference_seconds += seconds
        self.last_completed_at = time.perf_counter()
        for result in results:
            if isinstance(result, Exception):
                self.fail(result)
                return
        if self._finished == len(self.sequences):
            self._end_wait(JobState.COMPLETED)

    def fail(self, error: Exception) -> None:
        """Fail with `error`, unless the job is resolved."""
        if self.resolved:
            return
        # Each job gets a new error: a shared one would collect the tracebacks of all callers.
        if isinstance(error, SmartEmbedderError):
            self._error = type(error)(str(error), retry_after=error.retry_after)
        else:
            self._error = InferenceError("the model failed on this request")
            self._error.__cause__ = error
        self._end_wait(JobState.FAILED)

    def cancel(self) -> None:
        """Cancel the job, unless it is resolved."""
        if not self.resolved:
            self._end_wait(JobState.CANCELLED)

    async def wait_until_taken(self) -> None:
        """Wait until no sequence is queued; raise the error of a failed job."""
        await self._dequeued.wait()
        if self._error is not None:
            raise self._error

    async def result(self) -> list[Any]:
        """Wait for the results, one for each sequence in order; raise the error of a failed job."""
        await self._resolved.wait()
        if self._error is not None:
            raise self._error
        if self.state is JobState.CANCELLED:
            raise asyncio.CancelledError
        return self._results

    def _end_wait(self, state: JobState) -> None:
        """Change to a state in which no sequence waits, and leave the queue."""
        self.state = state
        if state is not JobState.TAKEN:
            self._resolved.set()
        leave, self.leave_queue = self.leave_queue, None
        if leave is not None:
            leave(self)
        self._dequeued.set()


def timings_of(started: float, *, tokenized: Iterable[Stage], jobs: Iterable[Job]) -> Timings:
    """Return the seconds of each stage since `started`.

    `queue` is all time outside tokenization and forwards. For a job, the stage `queue` ends when
    its first batch is taken, and `forward` lasts from then to the end of its last forward.
    """
    total = time.perf_counter() - started
    stages, inference = [*tokenized], 0.0
    tokenize = sum(stage.ended - stage.began for stage in stages)
    for job in jobs:
        inference += job.inference_seconds
        taken, completed, model = job.first_taken_at, job.last_completed_at, job.model.name
        if taken is not None:
            stages.append(Stage("queue", job.enqueued_at, taken, model))
            if completed is not None:
                stages.append(Stage("forward", taken, completed, model, job.inference_seconds))
    queue = max(0.0, total - tokenize - inference)
    return Timings(tokenize, queue, inference, total, tuple(stages))
