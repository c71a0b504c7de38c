"""Where a request's time went."""

import time
from collections.abc import Iterable, Iterator

from app.engine.job import Job
from app.observability.tracing import Stage, Timings


def timings_of(started: float, *, tokenized: Iterable[Stage], jobs: Iterable[Job]) -> Timings:
    """Seconds in each stage up to now; what is neither tokenising nor a forward was waiting."""
    total = time.perf_counter() - started
    tokenized, jobs = tuple(tokenized), tuple(jobs)
    tokenize = sum(stage.ended - stage.began for stage in tokenized)
    inference = sum(job.inference_seconds for job in jobs)
    stages = (*tokenized, *(stage for job in jobs for stage in _stages_of(job)))
    return Timings(tokenize, max(0.0, total - tokenize - inference), inference, total, stages)


def _stages_of(job: Job) -> Iterator[Stage]:
    """The wait for the first forward, and the time until the last one was back."""
    taken, back, model = job.first_taken_at, job.last_back_at, job.model.name
    if taken is not None:
        yield Stage("queue", job.enqueued_at, taken, model)
        if back is not None:
            yield Stage("forward", taken, back, model, job.inference_seconds)
