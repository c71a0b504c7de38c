"""The work of one request for one model: a state machine that owns its state."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum, auto
from typing import Any

from smart_embedder.errors import InferenceError, SmartEmbedderError
from smart_embedder.interface import Model
from smart_embedder.requests import Outputs, Purpose
from smart_embedder.results import Stage, Timings
from smart_embedder.tokens import TokenSequence


class JobState(Enum):
    """`WAITING` while sequences are queued, `TAKEN` once the device has all, then a final state."""

    WAITING = auto()
    TAKEN = auto()
    COMPLETED = auto()
    FAILED = auto()
    CANCELLED = auto()


@dataclass(slots=True, eq=False, repr=False)
class Job:
    """The sequences of one request for one model, on their way through the device.

    The device takes them in order, in one or more batches, and makes `outputs` of each. The job is
    interactive, or `is_bulk`. `time_limit` is the most seconds of its forwards together, of which
    `time_spent` have passed; None limits each forward by itself. `reduce` is called off the event
    loop with each result, and returns what is kept in its place.

    The rest changes on its way. The device has `taken` so many sequences, and `waiting_tokens` are
    those of the others. `inference_seconds` are those of the forwards that held a part of it. The
    queue that it enters sets `leave_queue`, which is called once, when no sequence waits.

    Each transition is a method that changes state, outcome and place in the queue together: a
    resolved job is in no queue, and is resolved once. All methods must be called in the event
    loop's thread.
    """

    model: Model
    sequences: Sequence[TokenSequence]
    outputs: Outputs
    _: KW_ONLY
    purpose: Purpose = Purpose.EMBEDDING
    client: str = ""
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

    def __post_init__(self) -> None:
        self.enqueued_at = time.perf_counter()
        self._results = [None] * len(self.sequences)
        self.waiting_tokens = sum(map(len, self.sequences))

    @property
    def waiting(self) -> bool:
        """Whether sequences of it still wait for the device."""
        return self.state is JobState.WAITING

    @property
    def resolved(self) -> bool:
        """Whether it is in a final state."""
        return self._resolved.is_set()

    def take(self, count: int, now: float) -> None:
        """Mark its next `count` sequences as taken by the device."""
        self.waiting_tokens -= sum(map(len, self.sequences[self.taken : self.taken + count]))
        self.taken += count
        if self.first_taken_at is None:
            self.first_taken_at = now
        if self.taken == len(self.sequences):
            self._end_wait(JobState.TAKEN)

    def complete(self, start: int, results: Sequence[Any], seconds: float) -> None:
        """Store `results` of its sequences from `start` on; their forward took `seconds`.

        A result that is an error fails the job.
        """
        if self.resolved:
            return
        self._results[start : start + len(results)] = results
        self._finished += len(results)
        self.inference_seconds += seconds
        self.last_completed_at = time.perf_counter()
        for each in results:
            if isinstance(each, Exception):
                self.fail(each)
                return
        if self._finished == len(self.sequences):
            self._end_wait(JobState.COMPLETED)

    def fail(self, error: Exception) -> None:
        """Fail with `error`, unless it is resolved."""
        if self.resolved:
            return
        # A new error for each job: a shared one would collect the tracebacks of all callers.
        if isinstance(error, SmartEmbedderError):
            self._error = type(error)(str(error), retry_after=error.retry_after)
        else:
            self._error = InferenceError("the model failed on this request")
            self._error.__cause__ = error
        self._end_wait(JobState.FAILED)

    def cancel(self) -> None:
        """Cancel it, unless it is resolved."""
        if not self.resolved:
            self._end_wait(JobState.CANCELLED)

    async def dequeued(self) -> None:
        """Return when no sequence of it is queued; raises the error that it failed with."""
        await self._dequeued.wait()
        if self._error is not None:
            raise self._error

    async def result(self) -> list[Any]:
        """A result for each sequence, in order; raises the error that it failed with."""
        await self._resolved.wait()
        if self._error is not None:
            raise self._error
        if self.state is JobState.CANCELLED:
            raise asyncio.CancelledError
        return self._results

    def _end_wait(self, state: JobState) -> None:
        """Leave the queue, if it is still there, for a state in which no sequence waits."""
        self.state = state
        if state is not JobState.TAKEN:
            self._resolved.set()
        leave, self.leave_queue = self.leave_queue, None
        if leave is not None:
            leave(self)
        self._dequeued.set()


def timings_of(started: float, *, tokenized: Iterable[Stage], jobs: Iterable[Job]) -> Timings:
    """Seconds in each stage until now; `queue` is all time outside tokenizing and forwards.

    The stages of a job are its wait for the first forward, and from there to the end of the last.
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
