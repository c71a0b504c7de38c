"""The work of one request for one model: a state machine that owns its state."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum, auto
from typing import Any

from smart_embedder.engine import clock
from smart_embedder.engine.model import Model
from smart_embedder.engine.records import Outputs, TokenSequence
from smart_embedder.errors import InferenceError, SmartEmbedderError


class Purpose(Enum):
    """Which metrics count a request and its forwards."""

    EMBEDDING = auto()
    RERANKING = auto()


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

    The device takes them in order, in one or more batches. `outputs` are the outputs of each
    sequence. `weight` is the job's share of the device beside the other jobs of its client.
    `time_limit` is the most seconds of its forwards together, of which `time_spent` have passed;
    None limits each forward by itself. `reduce` is called off the event loop with the index of each
    sequence and its result, and returns what is kept as its result.

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
    weight: float = 1.0
    time_limit: float | None = None
    time_spent: float = 0.0
    reduce: Callable[[int, Any], Any] | None = None
    enqueued_at: float = field(init=False)
    _state: JobState = field(init=False, default=JobState.WAITING)
    _leave_queue: "Callable[[Job], None] | None" = field(init=False, default=None)
    _virtual_start: float = field(init=False, default=0.0)
    _taken: int = field(init=False, default=0)
    _waiting_tokens: int = field(init=False)
    _finished: int = field(init=False, default=0)
    _first_taken_at: float | None = field(init=False, default=None)
    _last_completed_at: float | None = field(init=False, default=None)
    _inference_seconds: float = field(init=False, default=0.0)
    _results: list[Any] = field(init=False)
    _error: SmartEmbedderError | None = field(init=False, default=None)
    _dequeued: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _resolved: asyncio.Event = field(init=False, default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.enqueued_at = clock.now()
        self._results = [None] * len(self.sequences)
        self._waiting_tokens = sum(map(len, self.sequences))

    @property
    def state(self) -> JobState:
        """The current state."""
        return self._state

    @property
    def taken(self) -> int:
        """How many of its sequences the device has taken."""
        return self._taken

    @property
    def waiting(self) -> bool:
        """Whether sequences of it still wait for the device."""
        return self._state is JobState.WAITING

    @property
    def resolved(self) -> bool:
        """Whether it is in a final state."""
        return self._resolved.is_set()

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the sequences that the device has not taken."""
        return self._waiting_tokens

    @property
    def virtual_start(self) -> float:
        """The virtual start of its next sequence: see `batcher`."""
        return self._virtual_start

    @property
    def first_taken_at(self) -> float | None:
        """When its first sequence went to the device, by `clock.now`."""
        return self._first_taken_at

    @property
    def last_completed_at(self) -> float | None:
        """When its latest results arrived, by `clock.now`."""
        return self._last_completed_at

    @property
    def inference_seconds(self) -> float:
        """Seconds of the forwards that held a part of it."""
        return self._inference_seconds

    @property
    def time_left(self) -> float | None:
        """Seconds that its forwards may still take; None without a `time_limit`."""
        if self.time_limit is None:
            return None
        return self.time_limit - self.time_spent - self._inference_seconds

    def enter(self, virtual_start: float, leave: "Callable[[Job], None]") -> None:
        """Enter a queue, whose `leave` is called once, when no sequence waits any longer."""
        self._virtual_start = virtual_start
        self._leave_queue = leave

    def bound_lead(self, virtual_start: float) -> None:
        """Let its next sequence start there at the latest."""
        self._virtual_start = min(self._virtual_start, virtual_start)

    def take(self, count: int, now: float) -> None:
        """Mark its next `count` sequences as taken by the device."""
        tokens = sum(map(len, self.sequences[self._taken : self._taken + count]))
        self._virtual_start += tokens / self.weight
        self._waiting_tokens -= tokens
        self._taken += count
        if self._first_taken_at is None:
            self._first_taken_at = now
        if self._taken == len(self.sequences):
            self._state = JobState.TAKEN
            self._dequeue()

    def complete(self, start: int, results: Sequence[Any], seconds: float) -> None:
        """Store `results` of its sequences from `start` on; their forward took `seconds`.

        A result that is an error fails the job.
        """
        if self.resolved:
            return
        self._results[start : start + len(results)] = results
        self._finished += len(results)
        self._inference_seconds += seconds
        self._last_completed_at = clock.now()
        error = next((each for each in results if isinstance(each, Exception)), None)
        if error is not None:
            self.fail(error)
        elif self._finished == len(self.sequences):
            self._resolve(JobState.COMPLETED)

    def fail(self, error: Exception) -> None:
        """Fail with `error`, unless it is resolved."""
        if not self.resolved:
            self._error = _error_for_one_job(error)
            self._resolve(JobState.FAILED)

    def cancel(self) -> None:
        """Cancel it, unless it is resolved."""
        if not self.resolved:
            self._resolve(JobState.CANCELLED)

    def forget(self) -> None:
        """Let go of its results and its `reduce`, when it is resolved; its times are left."""
        self._results, self.reduce = [], None

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
        if self._state is JobState.CANCELLED:
            raise asyncio.CancelledError
        return self._results

    def _resolve(self, state: JobState) -> None:
        self._state = state
        self._resolved.set()
        self._dequeue()

    def _dequeue(self) -> None:
        leave, self._leave_queue = self._leave_queue, None
        if leave is not None:
            leave(self)
        self._dequeued.set()


def _error_for_one_job(error: Exception) -> SmartEmbedderError:
    """A new error for each job: a shared one would collect the tracebacks of all callers."""
    if isinstance(error, SmartEmbedderError):
        return type(error)(str(error), retry_after=error.retry_after)
    wrapped = InferenceError("the model failed on this request")
    wrapped.__cause__ = error
    return wrapped
