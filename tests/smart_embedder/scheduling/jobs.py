"""Short constructors of jobs, batches and queues for tests."""

import numpy as np

from smart_embedder.requests import Outputs
from smart_embedder.scheduling.batcher import Batch, BatchLimits, BatchSlice
from smart_embedder.scheduling.job import Job
from smart_embedder.scheduling.queue import JobQueue
from tests.smart_embedder.fakes import FakeModel

MODEL, OTHER = FakeModel(), FakeModel()
DENSE = Outputs(dense=True)


def job(
    *lengths: int,
    model: FakeModel = MODEL,
    bulk: bool = False,
    outputs: Outputs = DENSE,
    **options,
) -> Job:
    sequences = [np.zeros(length, np.int64) for length in lengths]
    return Job(model, sequences, outputs, is_bulk=bulk, **options)


def batch_of(*slices: Job | tuple[Job, int, int]) -> Batch:
    """A batch of whole jobs, or of slices (job, start, stop)."""
    parts = [
        BatchSlice(part, 0, len(part.sequences)) if isinstance(part, Job) else BatchSlice(*part)
        for part in slices
    ]
    return Batch(parts[0].job.model, parts)


def queue_of(*jobs: Job) -> JobQueue:
    queue = JobQueue()
    for waiting in jobs:
        queue.put(waiting)
    return queue


def take(queue: JobQueue, budget: int = 16, **options) -> Batch:
    batch = queue.take(lambda _: BatchLimits(budget), **options)
    assert batch is not None
    return batch
