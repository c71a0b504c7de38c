"""What becomes of a batch: every result goes to its request, and so does every failure."""

import time
from typing import Any

import structlog

from app.errors import InferenceError, SmartEmbedderError
from app.jobs import Batch, Job

log = structlog.get_logger(__name__)


def deliver(batch: Batch, results: list[Any], seconds: float) -> None:
    """Hand each result to its job; a job that has all of its own is done."""
    begin, now = 0, time.perf_counter()
    for share in batch.shares:
        job, count = share.job, share.stop - share.start
        job.results[share.start : share.stop] = results[begin : begin + count]
        job.finished += count
        job.inference_seconds += seconds
        job.last_back_at = now
        begin += count
        if job.finished == len(job.sequences) and not job.future.done():
            job.future.set_result(job.results)


def fail(batch: Batch, error: Exception) -> None:
    """Tell every job of the batch; an error that is not ours is logged."""
    if not isinstance(error, SmartEmbedderError):
        log.error("batch_failed", model=batch.model.name, tokens=batch.tokens, exc_info=error)
    for share in batch.shares:
        fail_job(share.job, error)


def fail_job(job: Job, error: Exception) -> None:
    """Tell one job, if it still waits."""
    if not job.future.done():
        job.future.set_exception(_as_domain_error(error))


def _as_domain_error(error: Exception) -> SmartEmbedderError:
    """An error of its own for each job: a shared one would gather everybody's tracebacks."""
    if isinstance(error, SmartEmbedderError):
        return type(error)(str(error), retry_after=error.retry_after)
    wrapped = InferenceError("the model failed on this request")
    wrapped.__cause__ = error
    return wrapped
