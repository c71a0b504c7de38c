"""Choosing the next batch: a pure function of the waiting jobs and the limits of one forward.

The policy is weighted fair queueing with the sequence as its unit. Every job carries a virtual
start; the job with the smallest goes next, and each sequence taken moves it on by that sequence's
tokens. A newcomer starts at the virtual time, which moves on by each batch's tokens divided by the
jobs that shared the device. So a short request overtakes a long one that has had its share, many
short ones together still leave the long one its share, and nobody waits for ever.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from app.jobs import Batch, Job, Share


@dataclass(frozen=True, slots=True)
class Limits:
    """What one forward may hold; a single longer sequence goes alone."""

    max_tokens: int


def form_batch(jobs: Sequence[Job], limits: Limits) -> Batch:
    """The next batch from `jobs`, of which at least one must be waiting; changes nothing.

    `jobs` are in order of arrival, which decides between equals. The first sequence chosen is
    taken whatever its length and fixes the model; later ones must fit what is left.
    """
    rivals = [
        (job.virtual_start, order, job.taken) for order, job in enumerate(jobs) if job.waiting
    ]
    heapq.heapify(rivals)
    model = jobs[rivals[0][1]].model
    places = model.max_batch_sequences or limits.max_tokens
    stops: dict[int, int] = {}
    tokens_left = limits.max_tokens
    while rivals and tokens_left > 0 and places > 0:
        virtual_start, order, index = heapq.heappop(rivals)
        job = jobs[order]
        length = len(job.sequences[index])
        if job.model is not model or (stops and length > tokens_left):
            continue
        stops[order] = index + 1
        tokens_left -= length
        places -= 1
        if index + 1 < len(job.sequences):
            heapq.heappush(rivals, (virtual_start + length, order, index + 1))
    return Batch(model, [Share(jobs[order], jobs[order].taken, stops[order]) for order in stops])
