"""Choosing the next batch: a pure function of the waiting jobs and the limits of one forward.

The policy is weighted fair queueing in two levels, with the sequence as its unit: the device is
shared between the clients that have work, and each client's share between its jobs.

- A client is a flow with a virtual start and the weight of its weightiest job. Each sequence that
  is taken advances the virtual start by its tokens divided by that weight.
- The flow whose next sequence has the smallest virtual finish is next. At most `QUANTUM_TOKENS` of
  a sequence count, so that a long text is not held back for its length. The same rule chooses among
  the jobs of a flow, with each job's own virtual start and weight.
- What does not fit the rest of a forward is passed over, and those after it may use that rest as
  long as they are then ahead of it by no more than a forward holds. Without this bound a background
  load of short texts would have the rest of every forward beside long ones, whatever its weight.
  What a new job may not have for that reason, no less urgent one of its client has, though it would
  be ahead by fewer tokens.
- A new flow starts at the virtual time, which each batch advances by its tokens divided by the
  weights of the flows that waited.

It follows that the more urgent of two new jobs is first; that a short request overtakes a long one
that has had its share; that many short requests leave a long one its share; that no client gains by
splitting its work into many requests; and, as every weight is above zero, that no job waits for
ever.

Urgency is that of RFC 9218, 0 (most urgent) to 7; each step doubles a job's share.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from smart_embedder.engine.model import Model
from smart_embedder.engine.records import Outputs, TextEmbedding, TokenSequence, join
from smart_embedder.engine.scheduling.job import Job, Purpose


@dataclass(frozen=True)
class BatchSlice:
    """The share of one job in a batch: its sequences from `start` up to `stop`."""

    job: Job
    start: int
    stop: int

    @property
    def count(self) -> int:
        """The number of its sequences."""
        return self.stop - self.start

    @property
    def sequences(self) -> Sequence[TokenSequence]:
        """The token ids of its sequences."""
        return self.job.sequences[self.start : self.stop]

    @cached_property
    def tokens(self) -> int:
        """The tokens of its sequences."""
        return sum(map(len, self.sequences))

    def split(self, count: int) -> "tuple[BatchSlice, BatchSlice]":
        """Its first `count` sequences, and the rest."""
        middle = self.start + count
        return BatchSlice(self.job, self.start, middle), BatchSlice(self.job, middle, self.stop)


@dataclass(frozen=True)
class Batch:
    """What one forward runs: slices of one or more jobs for the same model.

    `handed_over` says that another device has failed on it.
    """

    model: Model
    slices: list[BatchSlice]
    handed_over: bool = False

    @cached_property
    def sequences(self) -> list[TokenSequence]:
        """The token ids of every sequence, slice after slice."""
        return [ids for each in self.slices for ids in each.sequences]

    @cached_property
    def outputs(self) -> list[Outputs]:
        """The outputs of each sequence."""
        return [each.job.outputs for each in self.slices for _ in range(each.count)]

    @cached_property
    def tokens(self) -> int:
        """Tokens of the whole batch."""
        return sum(each.tokens for each in self.slices)

    @cached_property
    def weight(self) -> float:
        """The greatest weight of its jobs."""
        return max((each.job.weight for each in self.slices), default=0.0)

    @cached_property
    def client_tokens(self) -> dict[str, int]:
        """The tokens of each client."""
        tokens: Counter[str] = Counter()
        for batch_slice in self.slices:
            tokens[batch_slice.job.client] += batch_slice.tokens
        return tokens

    @cached_property
    def longest_slices(self) -> dict[str, int]:
        """The tokens of each client's longest slice."""
        longest: dict[str, int] = {}
        for batch_slice in self.slices:
            client = batch_slice.job.client
            longest[client] = max(longest.get(client, 0), batch_slice.tokens)
        return longest

    def count(self, purpose: Purpose) -> int:
        """The number of its sequences whose job has this purpose."""
        return sum(each.count for each in self.slices if each.job.purpose is purpose)

    def take(self, now: float) -> None:
        """Mark its sequences as taken, in every job."""
        for batch_slice in self.slices:
            batch_slice.job.take(batch_slice.count, now)

    def launch(self, model: Model) -> Callable[[], list[Any]]:
        """Launch the forward, in the device thread; return a function that waits for its results.

        `model` is the batch's own model, or the replica of it on this device.
        """
        collect = model.launch([join(ids) for ids in self.sequences], self.outputs)
        return lambda: self._reduce(collect())

    def complete(self, results: Sequence[Any], seconds: float) -> None:
        """Give each job the results of its sequences; the forward took `seconds`."""
        begin = 0
        for batch_slice in self.slices:
            batch_slice.job.complete(
                batch_slice.start, results[begin : begin + batch_slice.count], seconds
            )
            begin += batch_slice.count

    def fail(self, error: Exception) -> None:
        """Fail every job that has a slice in it."""
        for batch_slice in self.slices:
            batch_slice.job.fail(error)

    def unresolved(self) -> "Batch":
        """The same batch without the slices of jobs that are resolved."""
        slices = [each for each in self.slices if not each.job.resolved]
        return self if len(slices) == len(self.slices) else replace(self, slices=slices)

    def halves(self) -> "tuple[Batch, Batch]":
        """Two batches of half of its sequences each; the first is empty for a single sequence."""
        left = len(self.sequences) // 2
        first: list[BatchSlice] = []
        second: list[BatchSlice] = []
        for batch_slice in self.slices:
            count = min(left, batch_slice.count)
            left -= count
            for piece, slices in zip(batch_slice.split(count), (first, second), strict=True):
                if piece.count:
                    slices.append(piece)
        return replace(self, slices=first), replace(self, slices=second)

    def _reduce(self, results: Sequence[Any]) -> list[Any]:
        """What each job keeps of its results, of which none keeps those of another one alive."""
        reduced: list[Any] = []
        for batch_slice in self.slices:
            own = results[len(reduced) : len(reduced) + batch_slice.count]
            reduced.extend(_reduce_each(batch_slice, own))
        if len(self.slices) == 1:
            return reduced
        return [
            each.copy() if isinstance(each, TextEmbedding | np.ndarray) else each
            for each in reduced
        ]


def _reduce_each(batch_slice: BatchSlice, results: Sequence[Any]) -> Sequence[Any]:
    """Reduce each result; an error in place of a result is kept."""
    reduce = batch_slice.job.reduce
    if reduce is None:
        return results
    return [
        each if isinstance(each, Exception) else reduce(index, each)
        for index, each in enumerate(results, batch_slice.start)
    ]


DEFAULT_URGENCY = 3
QUANTUM_TOKENS = 32
# The event loop waits meanwhile: thousands of short sequences are taken in about so many steps.
_ROUNDS = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """What one forward may hold; a single longer sequence goes alone."""

    max_tokens: int
    max_sequences: int | None = None
    max_requests: int | None = None


# Each model has a token budget of its own.
LimitsOf = Callable[[Model], Limits]


@dataclass(slots=True, eq=False)
class Flow:
    """The state of one client in fair queueing, in virtual time.

    `virtual_time` is the virtual start of the next job that it sends; `jobs` is how many wait.
    `least_weight` is the least that it has had.
    """

    virtual_start: float = 0.0
    virtual_time: float = 0.0
    jobs: int = 0
    least_weight: float = math.inf


def weight_of(urgency: int) -> float:
    """The weight of a job of this urgency; 1 for the default urgency."""
    return float(2.0 ** (DEFAULT_URGENCY - urgency))


def form_batch(jobs: Mapping[Job, Flow], limits_of: LimitsOf) -> Batch:
    """The next batch from `jobs`, of which at least one must be waiting; changes nothing.

    `jobs` are in order of arrival, which decides between equals. The first sequence chosen is
    taken whatever its length and fixes the model, whose limits count; later ones must fit what is
    left, and leave those that were passed over their share.
    """
    turns = [active.turn for active in _active_flows(jobs)]
    heapq.heapify(turns)
    filling = _Filling(limits_of)
    passed_over = math.inf
    while turns and not filling.full:
        active = heapq.heappop(turns).active
        candidate = heapq.heappop(active.candidates)
        room = filling.room(max(active.lead(passed_over), active.lead_of(candidate)))
        if filling.fits(candidate, room):
            active.advance(candidate, *filling.add(candidate, room))
        else:
            active.pass_over(candidate, is_ahead=filling.fits(candidate, filling.room(0)))
        if active.candidates:
            heapq.heappush(turns, active.turn)
        elif active.passed_over < math.inf:
            passed_over = min(passed_over, active.latest_finish)
    return filling.batch()


class _Candidate(NamedTuple):
    """A job's next sequence; the smallest of one client goes first. `order` is unique."""

    virtual_finish: float
    order: int
    virtual_start: float
    job: Job
    start: int
    tokens: int

    @property
    def latest_finish(self) -> float:
        """Its virtual finish if it is long."""
        return self.virtual_start + QUANTUM_TOKENS / self.job.weight

    def lead(self, finish: float) -> float:
        """The tokens that its job has had beyond a virtual finish."""
        return (self.virtual_start - finish) * self.job.weight


class _Turn(NamedTuple):
    """A client's next sequence; the smallest goes first."""

    virtual_finish: float
    order: int
    active: "_ActiveFlow"


@dataclass(slots=True)
class _ActiveFlow:
    """A client while a batch is formed; `candidates` is a heap.

    `passed_over` is the earliest `latest_finish` of its jobs that were passed over.
    `refused_weight` is the greatest weight of its new jobs that were refused the rest as they are
    too far ahead.
    """

    virtual_start: float
    weight: float = 0.0
    candidates: list[_Candidate] = field(default_factory=list)
    passed_over: float = math.inf
    refused_weight: float = 0.0

    @property
    def turn(self) -> _Turn:
        best = self.candidates[0]
        finish = self.virtual_start + min(best.tokens, QUANTUM_TOKENS) / self.weight
        return _Turn(finish, best.order, self)

    @property
    def latest_finish(self) -> float:
        """The virtual finish of its next sequence if that is long."""
        return self.virtual_start + QUANTUM_TOKENS / self.weight

    def lead(self, finish: float) -> float:
        """The tokens that it has had beyond a virtual finish."""
        return (self.virtual_start - finish) * self.weight

    def lead_of(self, candidate: _Candidate) -> float:
        """The tokens that one of its jobs has had beyond those that were passed over."""
        if candidate.job.weight < self.refused_weight:
            return math.inf
        return candidate.lead(self.passed_over)

    def pass_over(self, candidate: _Candidate, *, is_ahead: bool) -> None:
        """Leave a candidate out, for its length or its model, or as it `is_ahead` of others."""
        self.passed_over = min(self.passed_over, candidate.latest_finish)
        if is_ahead and not candidate.start:
            self.refused_weight = max(self.refused_weight, candidate.job.weight)

    def advance(self, chosen: _Candidate, after: int, tokens: int) -> None:
        """Advance by the tokens that were taken; the job's next sequence is at `after`."""
        self.virtual_start += tokens / self.weight
        job = chosen.job
        if after < len(job.sequences):
            start = chosen.virtual_start + tokens / job.weight
            heapq.heappush(self.candidates, _candidate(job, chosen.order, after, start))


def _active_flows(jobs: Mapping[Job, Flow]) -> Iterable[_ActiveFlow]:
    active_flows: dict[Flow, _ActiveFlow] = {}
    for order, (job, flow) in enumerate(jobs.items()):
        active = active_flows.get(flow)
        if active is None:
            active = active_flows[flow] = _ActiveFlow(flow.virtual_start)
        active.weight = max(active.weight, job.weight)
        active.candidates.append(_candidate(job, order, job.taken, job.virtual_start))
    for active in active_flows.values():
        heapq.heapify(active.candidates)
    return active_flows.values()


def _candidate(job: Job, order: int, start: int, virtual_start: float) -> _Candidate:
    tokens = len(job.sequences[start])
    finish = virtual_start + min(tokens, QUANTUM_TOKENS) / job.weight
    return _Candidate(finish, order, virtual_start, job, start, tokens)


class _Filling:
    """A batch while it is formed; the first sequence fixes its model."""

    def __init__(self, limits_of: LimitsOf) -> None:
        self._limits_of = limits_of
        # Until the model is fixed; its limits are known only then.
        self._tokens_left = self._sequences_left = 1
        self._most_tokens = self._turn_tokens = self._max_requests = 0
        self._model: Model | None = None
        self._stops: dict[Job, int] = {}

    @property
    def full(self) -> bool:
        """Whether nothing more can be added."""
        return self._tokens_left <= 0 or self._sequences_left <= 0

    def room(self, lead: float) -> float:
        """The tokens for whoever has had `lead` more than its turn gives it, or less if below 0."""
        return min(self._tokens_left, self._most_tokens - lead)

    def fits(self, candidate: _Candidate, room: float) -> bool:
        """Whether a sequence fits beside the chosen ones; the first always does."""
        return self._model is None or (
            candidate.job.model is self._model
            and candidate.tokens <= room
            and (candidate.job in self._stops or len(self._stops) < self._max_requests)
        )

    def add(self, candidate: _Candidate, room: float) -> tuple[int, int]:
        """Take the job's next sequences, one or as many as a turn holds.

        Returns the index after the last one, and their tokens.
        """
        if self._model is None:
            self._fix_model(candidate.job.model)
            room = self._tokens_left
        lengths = self._turn(candidate, room)
        after, tokens = candidate.start + len(lengths), sum(lengths)
        self._stops[candidate.job] = after
        self._sequences_left -= len(lengths)
        self._tokens_left -= tokens
        return after, tokens

    def _turn(self, candidate: _Candidate, room: float) -> list[int]:
        """The lengths of the sequences that one turn holds, from the candidate on."""
        first = candidate.start + 1
        lengths = [candidate.tokens]
        left = int(min(self._turn_tokens, room)) - candidate.tokens
        for ids in candidate.job.sequences[
            first : first + max(0, min(left, self._sequences_left - 1))
        ]:
            left -= len(ids)
            if left < 0:
                break
            lengths.append(len(ids))
        return lengths

    def _fix_model(self, model: Model) -> None:
        limits = self._limits_of(model)
        self._model = model
        self._tokens_left = self._most_tokens = limits.max_tokens
        self._turn_tokens = limits.max_tokens // _ROUNDS
        self._max_requests = limits.max_requests or limits.max_tokens
        most = limits.max_sequences or limits.max_tokens
        self._sequences_left = min(most, model.max_batch_sequences or most)

    def batch(self) -> Batch:
        slices = [BatchSlice(job, job.taken, stop) for job, stop in self._stops.items()]
        return Batch(slices[0].job.model, slices)
