"""Jobs, batches and queues, built in a line."""

import numpy as np

from smart_embedder.requests import Outputs
from smart_embedder.scheduling.batcher import Batch, BatchSlice, Limits
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
    """Of jobs as a whole, or from a sequence up to another."""
    parts = [
        BatchSlice(each, 0, len(each.sequences)) if isinstance(each, Job) else BatchSlice(*each)
        for each in slices
    ]
    return Batch(parts[0].job.model, parts)


def queue_of(*jobs: Job) -> JobQueue:
    queue = JobQueue()
    for each in jobs:
        queue.put(each)
    return queue


def take(queue: JobQueue, budget: int = 16, **options) -> Batch:
    batch = queue.take(lambda _: Limits(budget), **options)
    assert batch is not None
    return batch
