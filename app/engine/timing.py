"""Where a request's time went."""

import time
from collections.abc import Iterable

from app.jobs import Job, Timings


def timings_of(started: float, *, tokenize: float, jobs: Iterable[Job]) -> Timings:
    """Seconds in each stage up to now; what is neither tokenising nor a forward was waiting."""
    total = time.perf_counter() - started
    inference = sum(job.inference_seconds for job in jobs)
    return Timings(tokenize, max(0.0, total - tokenize - inference), inference, total)
