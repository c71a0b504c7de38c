"""Choosing the next batch: a pure function of the waiting jobs and the limits of one forward.

The policy is weighted fair queueing with the sequence as its unit. Every job carries a virtual
start, and each of its sequences taken moves it on by that sequence's tokens divided by the job's
weight. The job whose next sequence would be done first, counting no more than its first
`QUANTUM_TOKENS`, goes next: so the more urgent of two newcomers is first, and a long text is not
held back for its length. A newcomer starts at the virtual time, which moves on by each batch's
tokens divided by the weights that shared the device. So a short request overtakes a long one that
has had its share, many short ones together still leave the long one its share, and since every
weight is above zero nobody waits for ever.

Urgency is that of RFC 9218, 0 (most urgent) to 7; each step doubles a job's share.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from app.jobs import Batch, Job, Share

DEFAULT_URGENCY = 3
QUANTUM_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Limits:
    """What one forward may hold; a single longer sequence goes alone."""

    max_tokens: int


def weight_of(urgency: int) -> float:
    """The share of the device that a job of this urgency has beside one of the default urgency."""
    return float(2.0 ** (DEFAULT_URGENCY - urgency))


def form_batch(jobs: Sequence[Job], limits: Limits) -> Batch:
    """The next batch from `jobs`, of which at least one must be waiting; changes nothing.

    `jobs` are in order of arrival, which decides between equals. The first sequence chosen is
    taken whatever its length and fixes the model; later ones must fit what is left.
    """
    rivals = [
        _rival(job, order, job.taken, job.virtual_start)
        for order, job in enumerate(jobs)
        if job.waiting
    ]
    heapq.heapify(rivals)
    model = jobs[rivals[0].order].model
    places = model.max_batch_sequences or limits.max_tokens
    stops: dict[int, int] = {}
    tokens_left = limits.max_tokens
    while rivals and tokens_left > 0 and places > 0:
        rival = heapq.heappop(rivals)
        job, after = jobs[rival.order], rival.place + 1
        length = len(job.sequences[rival.place])
        if job.model is not model or (stops and length > tokens_left):
            continue
        stops[rival.order] = after
        tokens_left -= length
        places -= 1
        if after < len(job.sequences):
            start = rival.virtual_start + length / job.weight
            heapq.heappush(rivals, _rival(job, rival.order, after, start))
    return Batch(model, [Share(jobs[order], jobs[order].taken, stops[order]) for order in stops])


class _Rival(NamedTuple):
    """A job's next sequence; the smallest goes first."""

    virtual_finish: float
    order: int
    place: int
    virtual_start: float


def _rival(job: Job, order: int, place: int, virtual_start: float) -> _Rival:
    quantum = min(len(job.sequences[place]), QUANTUM_TOKENS)
    return _Rival(virtual_start + quantum / job.weight, order, place, virtual_start)
