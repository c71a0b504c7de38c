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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from smart_embedder.engine import records
from smart_embedder.engine.model import Model
from smart_embedder.engine.scheduling.job import Job

QUANTUM_TOKENS = 32
# The event loop waits meanwhile: thousands of short sequences are taken in about so many steps.
_ROUNDS = 64


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

    @cached_property
    def tokens(self) -> int:
        """The tokens of its sequences."""
        return sum(map(len, self.job.sequences[self.start : self.stop]))


@dataclass(frozen=True)
class Batch:
    """What one forward runs: slices of one or more jobs for the same model.

    `handed_over` says that another device has failed on it.
    """

    model: Model
    slices: list[BatchSlice]
    handed_over: bool = False

    @cached_property
    def sequences(self) -> list[records.TokenSequence]:
        """The token ids of every sequence, slice after slice."""
        sequences: list[records.TokenSequence] = []
        for each in self.slices:
            sequences += each.job.sequences[each.start : each.stop]
        return sequences

    @cached_property
    def tokens(self) -> int:
        """Tokens of the whole batch."""
        return sum(map(len, self.sequences))

    @cached_property
    def client_tokens(self) -> dict[str, int]:
        """The tokens of each client."""
        tokens: Counter[str] = Counter()
        for each in self.slices:
            tokens[each.job.client] += each.tokens
        return tokens

    def launch(self, model: Model) -> Callable[[], list[Any]]:
        """Launch the forward, in the device thread; return a function that waits for its results.

        `model` is the batch's own model, or the replica of it on this device.
        """
        outputs: list[records.Outputs] = []
        for each in self.slices:
            outputs += [each.job.outputs] * each.count
        collect = model.launch(list(map(records.join, self.sequences)), outputs)
        return partial(self._collect, collect)

    def complete(self, results: Sequence[Any], seconds: float) -> None:
        """Give each job the results of its sequences; the forward took `seconds`."""
        begin = 0
        for each in self.slices:
            each.job.complete(each.start, results[begin : begin + each.count], seconds)
            begin += each.count

    def fail(self, error: Exception) -> None:
        """Fail every job that has a slice in it."""
        for each in self.slices:
            each.job.fail(error)

    def unresolved(self) -> "Batch":
        """The same batch without the slices of jobs that are resolved."""
        slices = [each for each in self.slices if not each.job.resolved]
        return self if len(slices) == len(self.slices) else replace(self, slices=slices)

    def halves(self) -> "tuple[Batch, Batch]":
        """Two batches of half of its sequences each; the first is empty for a single sequence."""
        left = len(self.sequences) // 2
        first: list[BatchSlice] = []
        second: list[BatchSlice] = []
        for each in self.slices:
            middle = each.start + min(left, each.count)
            left -= middle - each.start
            if each.start < middle:
                first.append(BatchSlice(each.job, each.start, middle))
            if middle < each.stop:
                second.append(BatchSlice(each.job, middle, each.stop))
        return replace(self, slices=first), replace(self, slices=second)

    def _collect(self, collect: Callable[[], Sequence[Any]]) -> list[Any]:
        """What each job keeps of its results, of which none keeps those of another one alive.

        An error in place of a result is kept.
        """
        results, kept, start = collect(), list[Any](), 0
        for each in self.slices:
            own, reduce = results[start : start + each.count], each.job.reduce
            start += each.count
            if reduce is not None:
                own = [
                    result if isinstance(result, Exception) else reduce(index, result)
                    for index, result in enumerate(own, each.start)
                ]
            kept += own if len(self.slices) == 1 else _without_others(own)
        return kept


def _without_others(results: Sequence[Any]) -> list[Any]:
    """The results of one job as no views of what others have, too."""
    embeddings = [each for each in results if isinstance(each, records.TextEmbedding)]
    copies = iter(records.in_own_memory(embeddings))
    kept: list[Any] = []
    for each in results:
        if isinstance(each, records.TextEmbedding):
            kept.append(next(copies))
        else:
            kept.append(each.copy() if isinstance(each, np.ndarray) else each)
    return kept


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
    return float(2.0 ** (records.DEFAULT_URGENCY - urgency))


def form_batch(jobs: Mapping[Job, Flow], limits_of: LimitsOf) -> Batch:
    """The next batch from `jobs`, of which at least one must be waiting; changes nothing.

    `jobs` are in order of arrival, which decides between equals. The first sequence chosen is
    taken whatever its length and fixes the model, whose limits count; later ones must fit what is
    left, and leave those that were passed over their share.
    """
    clients: dict[Flow, _ActiveFlow] = {}
    for order, (job, flow) in enumerate(jobs.items()):
        client = clients.get(flow)
        if client is None:
            client = clients[flow] = _ActiveFlow(flow.virtual_start)
        client.weight = max(client.weight, job.weight)
        client.candidates.append(_candidate(job, order, job.taken, job.virtual_start))
    for client in clients.values():
        heapq.heapify(client.candidates)
    turns = [client.turn() for client in clients.values()]
    heapq.heapify(turns)
    model = turns[0].client.candidates[0].job.model
    limits = limits_of(model)
    most_tokens = tokens_left = limits.max_tokens
    sequences_left = limits.max_sequences or most_tokens
    sequences_left = min(sequences_left, model.max_batch_sequences or sequences_left)
    stops: dict[Job, int] = {}
    # The earliest virtual finish of a client of which all that waits was passed over.
    passed_over = math.inf
    while turns and tokens_left > 0 and sequences_left > 0:
        client = heapq.heappop(turns).client
        candidate = heapq.heappop(client.candidates)
        job, start = candidate.job, candidate.start
        room = min(tokens_left, most_tokens - client.lead(candidate, passed_over))
        may_join = job.model is model and (
            job in stops or len(stops) < (limits.max_requests or most_tokens)
        )
        if not stops or (may_join and candidate.tokens <= room):
            at_once = int(min(most_tokens // _ROUNDS, room))
            after, tokens = candidate.extended(at_once, sequences_left)
            stops[job] = after
            sequences_left -= after - start
            tokens_left -= tokens
            client.advance(candidate, after, tokens)
        else:
            client.pass_over(candidate, is_ahead=may_join and candidate.tokens <= tokens_left)
        if client.candidates:
            heapq.heappush(turns, client.turn())
        elif client.passed_over < math.inf:
            finish = client.virtual_start + QUANTUM_TOKENS / client.weight
            passed_over = min(passed_over, finish)
    return Batch(model, [BatchSlice(job, job.taken, stop) for job, stop in stops.items()])


class _Candidate(NamedTuple):
    """A job's next sequence; the smallest of one client goes first. `order` is unique."""

    virtual_finish: float
    order: int
    virtual_start: float
    job: Job
    start: int
    tokens: int

    def extended(self, most: int, sequences: int) -> tuple[int, int]:
        """The end and the tokens of this sequence and those behind it, as many as a turn holds.

        They have at most so many tokens, and are at most so many `sequences`.
        """
        after, tokens = self.start + 1, self.tokens
        count = max(0, min(most - tokens, sequences - 1))
        for ids in self.job.sequences[after : after + count]:
            if tokens + len(ids) > most:
                break
            tokens += len(ids)
            after += 1
        return after, tokens


def _candidate(job: Job, order: int, start: int, virtual_start: float) -> _Candidate:
    tokens = len(job.sequences[start])
    finish = virtual_start + min(tokens, QUANTUM_TOKENS) / job.weight
    return _Candidate(finish, order, virtual_start, job, start, tokens)


class _Turn(NamedTuple):
    """A client's next sequence; the smallest goes first."""

    virtual_finish: float
    order: int
    client: "_ActiveFlow"


@dataclass(slots=True)
class _ActiveFlow:
    """A client while a batch is formed; `candidates` is a heap.

    `passed_over` is the earliest virtual finish that one of its jobs that were passed over may
    have. `refused_weight` is the greatest weight of its new jobs that were refused the rest as they
    are too far ahead.
    """

    virtual_start: float
    weight: float = 0.0
    candidates: list[_Candidate] = field(default_factory=list)
    passed_over: float = math.inf
    refused_weight: float = 0.0

    def turn(self) -> _Turn:
        """The turn of its first candidate."""
        best = self.candidates[0]
        finish = self.virtual_start + min(best.tokens, QUANTUM_TOKENS) / self.weight
        return _Turn(finish, best.order, self)

    def lead(self, candidate: _Candidate, passed_over: float) -> float:
        """The tokens that it, or its job, has had beyond those that were passed over.

        `passed_over` is the earliest virtual finish of other clients.
        """
        weight = candidate.job.weight
        if weight < self.refused_weight:
            return math.inf
        of_job = (candidate.virtual_start - self.passed_over) * weight
        return max((self.virtual_start - passed_over) * self.weight, of_job)

    def pass_over(self, candidate: _Candidate, *, is_ahead: bool) -> None:
        """Leave a candidate out, for its length or its model, or as it `is_ahead` of others."""
        weight = candidate.job.weight
        finish = candidate.virtual_start + QUANTUM_TOKENS / weight
        self.passed_over = min(self.passed_over, finish)
        if is_ahead and not candidate.start:
            self.refused_weight = max(self.refused_weight, weight)

    def advance(self, chosen: _Candidate, after: int, tokens: int) -> None:
        """Advance by the tokens that were taken; the job's next sequence is at `after`."""
        self.virtual_start += tokens / self.weight
        job = chosen.job
        if after < len(job.sequences):
            start = chosen.virtual_start + tokens / job.weight
            heapq.heappush(self.candidates, _candidate(job, chosen.order, after, start))
