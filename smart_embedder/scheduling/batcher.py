"""Form the next batch: a pure function of the waiting jobs and the limits of one forward.

Jobs wait in a tree of classes (interactive has weight 4, bulk 1), clients and jobs. All levels
follow one rule: each node counts the tokens that it was served, divided by its weight, and the
node with the lowest count is next (ties: interactive first, then in order of arrival).

The first sequence of a batch is taken whatever its length, and its model becomes the model of the
batch. A sequence that does not fit into the rest of the batch is passed over. Later sequences may
use the rest and are charged for it, while they are ahead of the skipped sequence by at most the
largest forward. `JobQueue` keeps the counts.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from smart_embedder.interface import Model
from smart_embedder.requests import Outputs
from smart_embedder.results import TextEmbedding, copy_embeddings
from smart_embedder.scheduling.job import Job
from smart_embedder.tokens import TokenSequence, join

INTERACTIVE_WEIGHT, BULK_WEIGHT = 4, 1
# A step takes this fraction of the budget: forming a batch of thousands of short sequences one by
# one would block the event loop.
_STEPS_PER_BATCH = 64


@dataclass(frozen=True)
class BatchSlice:
    """The part of a job that is in a batch: its sequences from `start` up to `stop`."""

    job: Job
    start: int
    stop: int

    @property
    def count(self) -> int:
        """The number of sequences."""
        return self.stop - self.start

    @cached_property
    def tokens(self) -> int:
        """The number of tokens."""
        return sum(map(len, self.job.sequences[self.start : self.stop]))


@dataclass(frozen=True)
class Batch:
    """The work of one forward: slices of one or more jobs for the same model.

    `handed_over` is set when another device has failed on the batch.
    """

    model: Model
    slices: list[BatchSlice]
    handed_over: bool = False

    @cached_property
    def sequences(self) -> list[TokenSequence]:
        """The token ids of every sequence, slice after slice."""
        sequences: list[TokenSequence] = []
        for part in self.slices:
            sequences += part.job.sequences[part.start : part.stop]
        return sequences

    @cached_property
    def tokens(self) -> int:
        """The number of tokens in the batch."""
        return sum(map(len, self.sequences))

    @cached_property
    def client_tokens(self) -> dict[str, int]:
        """The number of tokens of each client."""
        tokens: Counter[str] = Counter()
        for part in self.slices:
            tokens[part.job.client] += part.tokens
        return tokens

    def launch(self, model: Model) -> Callable[[], list[Any]]:
        """Launch the forward in the device thread; return a function that waits for the results.

        `model` is the batch's model, or its replica on this device.
        """
        outputs: list[Outputs] = []
        for part in self.slices:
            outputs += [part.job.outputs] * part.count
        collect = model.launch(list(map(join, self.sequences)), outputs)
        return partial(self._collect, collect)

    def complete(self, results: Sequence[Any], seconds: float) -> None:
        """Give each job the results of its sequences; the forward took `seconds`."""
        begin = 0
        for part in self.slices:
            part.job.complete(part.start, results[begin : begin + part.count], seconds)
            begin += part.count

    def fail(self, error: Exception) -> None:
        """Fail every job in the batch."""
        for part in self.slices:
            part.job.fail(error)

    def drop_resolved(self) -> "Batch":
        """Return the batch without the slices of resolved jobs."""
        slices = [part for part in self.slices if not part.job.resolved]
        return self if len(slices) == len(self.slices) else replace(self, slices=slices)

    def split_in_half(self) -> "tuple[Batch, Batch]":
        """Return two batches with half of the sequences each.

        The first half of a single sequence is empty.
        """
        left = len(self.sequences) // 2
        first: list[BatchSlice] = []
        second: list[BatchSlice] = []
        for part in self.slices:
            middle = part.start + min(left, part.count)
            left -= middle - part.start
            if part.start < middle:
                first.append(BatchSlice(part.job, part.start, middle))
            if middle < part.stop:
                second.append(BatchSlice(part.job, middle, part.stop))
        return replace(self, slices=first), replace(self, slices=second)

    def _collect(self, collect: Callable[[], Sequence[Any]]) -> list[Any]:
        """Reduce the results of each job, and copy them if the batch has several jobs.

        Without the copy, a job's results would be views that keep those of all jobs in memory.
        Errors among the results are kept as they are.
        """
        results, kept, start = collect(), list[Any](), 0
        for part in self.slices:
            part_results, reduce = results[start : start + part.count], part.job.reduce
            start += part.count
            if reduce is not None:
                part_results = [
                    result if isinstance(result, Exception) else reduce(result)
                    for result in part_results
                ]
            kept += part_results if len(self.slices) == 1 else _copy_results(part_results)
        return kept


def _copy_results(results: Sequence[Any]) -> list[Any]:
    """Copy the results of one job, which may be views of arrays of the whole batch."""
    embeddings = [result for result in results if isinstance(result, TextEmbedding)]
    copies = iter(copy_embeddings(embeddings))
    kept: list[Any] = []
    for result in results:
        if isinstance(result, TextEmbedding):
            kept.append(next(copies))
        else:
            kept.append(result.copy() if isinstance(result, np.ndarray) else result)
    return kept


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The limits of one forward. A single longer sequence forms a batch of its own."""

    max_tokens: int
    max_sequences: int | None = None
    max_requests: int | None = None


# Returns the limits of a model's forward: each model has its own token budget.
LimitsOf = Callable[[Model], BatchLimits]


@dataclass(slots=True, eq=False)
class Node:
    """The root, a class, a client or a job in the tree of waiting jobs.

    `served` is the number of tokens that it was served, divided by its weight. `clock` is the count
    at which a child starts that did not wait before. `jobs` is the number of jobs that wait below
    it, and `waiting_weight` the weight of its waiting children. Among nodes with equal counts, the
    one with the lower `order` is first.
    """

    order: int
    weight: int = 1
    served: float = 0.0
    clock: float = 0.0
    jobs: int = 0
    waiting_weight: int = 0


class TreePath(NamedTuple):
    """The nodes from the root to a job."""

    root: Node
    class_: Node
    client: Node
    job: Node


def form_batch(jobs: Mapping[Job, TreePath], limits_of: LimitsOf, max_lead: float) -> Batch:
    """Form the next batch from `jobs`, at least one of which must be waiting; change nothing.

    A node may be ahead of a node that was passed over by at most `max_lead`.
    """
    classes = _build_heaps(jobs)
    root = _Branch(Node(0), 0.0)
    model = min(classes).branch.next_job().job.model
    limits = limits_of(model)
    max_tokens = tokens_left = limits.max_tokens
    sequences_left = limits.max_sequences or max_tokens
    sequences_left = min(sequences_left, model.max_batch_sequences or sequences_left)
    stops: dict[Job, int] = {}
    while classes and tokens_left > 0 and sequences_left > 0:
        class_ = heapq.heappop(classes).branch
        client = heapq.heappop(class_.clients).branch
        served, order, job = heapq.heappop(client.jobs)
        start = stops.get(job, job.taken)
        may_join = job.model is model and (
            job in stops or len(stops) < (limits.max_requests or max_tokens)
        )
        job_lead_left = client.max_served - served
        client_lead_left = (class_.max_served - client.served) * client.node.weight
        class_lead_left = (root.max_served - class_.served) * class_.node.weight
        allowed_tokens = min(tokens_left, job_lead_left, client_lead_left, class_lead_left)
        if not stops or (may_join and len(job.sequences[start]) <= allowed_tokens):
            step_tokens = int(min(max_tokens // _STEPS_PER_BATCH, allowed_tokens))
            stop, tokens = _take_step(job, start, step_tokens, sequences_left)
            stops[job] = stop
            tokens_left -= tokens
            sequences_left -= stop - start
            client.served += tokens / client.node.weight
            class_.served += tokens / class_.node.weight
            if stop < len(job.sequences):
                heapq.heappush(client.jobs, _JobEntry(served + tokens, order, job))
        else:
            client.pass_over(served, max_lead)
        if client.jobs:
            heapq.heappush(class_.clients, client.entry())
        elif client.max_served < math.inf:
            class_.pass_over(client.served, max_lead)
        if class_.clients:
            heapq.heappush(classes, class_.entry())
        elif class_.max_served < math.inf:
            root.pass_over(class_.served, max_lead)
    return Batch(model, [BatchSlice(job, job.taken, stop) for job, stop in stops.items()])


class _JobEntry(NamedTuple):
    """A job in the heap of its client; `order` is unique, so jobs are never compared."""

    served: float
    order: int
    job: Job


class _BranchEntry(NamedTuple):
    """A class or a client in the heap of its parent."""

    served: float
    order: int
    branch: "_Branch"


@dataclass(slots=True)
class _Branch:
    """A class or a client while a batch is formed, with heaps of its children.

    A class has `clients`, a client has `jobs`. No child may get a count above `max_served` once
    another child was passed over.
    """

    node: Node
    served: float
    max_served: float = math.inf
    clients: list[_BranchEntry] = field(default_factory=list)
    jobs: list[_JobEntry] = field(default_factory=list)

    def entry(self) -> _BranchEntry:
        """Return its entry for the heap of its parent."""
        return _BranchEntry(self.served, self.node.order, self)

    def pass_over(self, served: float, max_lead: float) -> None:
        """Pass over a child that has the count `served`."""
        self.max_served = min(self.max_served, served + max_lead)

    def next_job(self) -> _JobEntry:
        """Return the job whose sequence is next."""
        return self.jobs[0] if self.jobs else self.clients[0].branch.next_job()


def _build_heaps(jobs: Mapping[Job, TreePath]) -> list[_BranchEntry]:
    """Return the heap of the classes in which the jobs wait."""
    branches: dict[Node, _Branch] = {}
    classes: list[_BranchEntry] = []
    for job, path in jobs.items():
        if path.class_ not in branches:
            branches[path.class_] = class_ = _Branch(path.class_, path.class_.served)
            classes.append(class_.entry())
        if path.client not in branches:
            branches[path.client] = client = _Branch(path.client, path.client.served)
            branches[path.class_].clients.append(client.entry())
        branches[path.client].jobs.append(_JobEntry(path.job.served, path.job.order, job))
    for branch in branches.values():
        heapq.heapify(branch.clients)
        heapq.heapify(branch.jobs)
    heapq.heapify(classes)
    return classes


def _take_step(job: Job, start: int, max_tokens: int, max_sequences: int) -> tuple[int, int]:
    """Take the sequence at `start` and those after it that fit; return the end and the tokens.

    The first sequence is taken whatever its length.
    """
    stop, tokens = start + 1, len(job.sequences[start])
    count = max(0, min(max_tokens - tokens, max_sequences - 1))
    for ids in job.sequences[stop : stop + count]:
        if tokens + len(ids) > max_tokens:
            break
        tokens += len(ids)
        stop += 1
    return stop, tokens
