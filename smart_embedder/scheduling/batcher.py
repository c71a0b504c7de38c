"""Choosing the next batch: a pure function of the waiting jobs and the limits of one forward.

Jobs wait in a tree of class (interactive weighs 4, bulk 1), client and job, and all levels share
one rule. Each node counts the tokens that it was served, divided by its weight. The next sequence
is that of the least class, its least client, its least job (ties: interactive, then arrival).

The first sequence of a batch is taken whatever its length and fixes the model. A sequence that does
not fit the rest is passed over; those behind it use the rest and are charged for it, as long as
they are ahead of it by no more than the largest forward. `JobQueue` keeps the counts.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from smart_embedder import requests as records
from smart_embedder.interface import Model
from smart_embedder.results import TextEmbedding, in_own_memory
from smart_embedder.scheduling.job import Job
from smart_embedder.tokens import TokenSequence, join

INTERACTIVE_WEIGHT, BULK_WEIGHT = 4, 1
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
    def sequences(self) -> list[TokenSequence]:
        """The token ids of every sequence, slice after slice."""
        sequences: list[TokenSequence] = []
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
        collect = model.launch(list(map(join, self.sequences)), outputs)
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
                    result if isinstance(result, Exception) else reduce(result) for result in own
                ]
            kept += own if len(self.slices) == 1 else _without_others(own)
        return kept


def _without_others(results: Sequence[Any]) -> list[Any]:
    """The results of one job as no views of what others have, too."""
    embeddings = [each for each in results if isinstance(each, TextEmbedding)]
    copies = iter(in_own_memory(embeddings))
    kept: list[Any] = []
    for each in results:
        if isinstance(each, TextEmbedding):
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
class Node:
    """A class, a client or a job, or the root, in the tree of what waits.

    `served` are the tokens that it was served, divided by its weight. `clock` is the count at which
    a child begins that did not wait before. `jobs` are how many jobs wait below it, and
    `waiting_weight` is that of its children that wait. Of equals the one with the lower `order` is
    first.
    """

    order: int
    weight: int = 1
    served: float = 0.0
    clock: float = 0.0
    jobs: int = 0
    waiting_weight: int = 0


class Path(NamedTuple):
    """Where a job waits."""

    root: Node
    class_: Node
    client: Node
    job: Node


def form_batch(jobs: Mapping[Job, Path], limits_of: LimitsOf, most_lead: float) -> Batch:
    """The next batch from `jobs`, of which at least one must be waiting; changes nothing.

    A node may be ahead of one that was passed over by at most `most_lead`.
    """
    classes = _branches(jobs)
    root = _Branch(Node(0), 0.0)
    model = min(classes).branch.first().job.model
    limits = limits_of(model)
    most_tokens = tokens_left = limits.max_tokens
    sequences_left = limits.max_sequences or most_tokens
    sequences_left = min(sequences_left, model.max_batch_sequences or sequences_left)
    stops: dict[Job, int] = {}
    while classes and tokens_left > 0 and sequences_left > 0:
        class_ = heapq.heappop(classes).branch
        client = heapq.heappop(class_.waiting).branch
        served, order, job = heapq.heappop(client.jobs)
        start = stops.get(job, job.taken)
        may_join = job.model is model and (
            job in stops or len(stops) < (limits.max_requests or most_tokens)
        )
        leads = client.most - served, class_.most - client.served
        room = min(tokens_left, *leads, (root.most - class_.served) * class_.node.weight)
        if not stops or (may_join and len(job.sequences[start]) <= room):
            step = int(min(most_tokens // _ROUNDS, room))
            stop, tokens = _run(job, start, step, sequences_left)
            stops[job] = stop
            tokens_left -= tokens
            sequences_left -= stop - start
            client.served += tokens
            class_.served += tokens / class_.node.weight
            if stop < len(job.sequences):
                heapq.heappush(client.jobs, _Waiting(served + tokens, order, job))
        else:
            client.pass_over(served, most_lead)
        if client.jobs:
            heapq.heappush(class_.waiting, client.entry())
        elif client.most < math.inf:
            class_.pass_over(client.served, most_lead)
        if class_.waiting:
            heapq.heappush(classes, class_.entry())
        elif class_.most < math.inf:
            root.pass_over(class_.served, most_lead)
    return Batch(model, [BatchSlice(job, job.taken, stop) for job, stop in stops.items()])


class _Waiting(NamedTuple):
    """A job while a batch is formed; the smallest goes first, and `order` is unique."""

    served: float
    order: int
    job: Job


class _Entry(NamedTuple):
    """A class or a client in the heap of its group."""

    served: float
    order: int
    branch: "_Branch"


@dataclass(slots=True)
class _Branch:
    """A group while a batch is formed; `waiting` and `jobs` are heaps of its children.

    `most` is the count that a child may reach beside those that were passed over.
    """

    node: Node
    served: float
    most: float = math.inf
    waiting: list[_Entry] = field(default_factory=list)
    jobs: list[_Waiting] = field(default_factory=list)

    def entry(self) -> _Entry:
        """It in the heap of its group."""
        return _Entry(self.served, self.node.order, self)

    def pass_over(self, served: float, most_lead: float) -> None:
        """Leave out a child of this count."""
        self.most = min(self.most, served + most_lead)

    def first(self) -> _Waiting:
        """The job whose sequence is next."""
        return self.jobs[0] if self.jobs else self.waiting[0].branch.first()


def _branches(jobs: Mapping[Job, Path]) -> list[_Entry]:
    """The heap of the classes in which these jobs wait."""
    branches: dict[Node, _Branch] = {}
    classes: list[_Entry] = []
    for job, path in jobs.items():
        if path.class_ not in branches:
            branches[path.class_] = class_ = _Branch(path.class_, path.class_.served)
            classes.append(class_.entry())
        if path.client not in branches:
            branches[path.client] = client = _Branch(path.client, path.client.served)
            branches[path.class_].waiting.append(client.entry())
        branches[path.client].jobs.append(_Waiting(path.job.served, path.job.order, job))
    for branch in branches.values():
        heapq.heapify(branch.waiting)
        heapq.heapify(branch.jobs)
    heapq.heapify(classes)
    return classes


def _run(job: Job, start: int, most_tokens: int, most_sequences: int) -> tuple[int, int]:
    """The end and the tokens of the sequence at `start` and those behind it, as many as a step has.

    The first counts whatever its length.
    """
    stop, tokens = start + 1, len(job.sequences[start])
    count = max(0, min(most_tokens - tokens, most_sequences - 1))
    for ids in job.sequences[stop : stop + count]:
        if tokens + len(ids) > most_tokens:
            break
        tokens += len(ids)
        stop += 1
    return stop, tokens
