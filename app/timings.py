"""Where a request's time went, as durations for its answer and as moments for its trace."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a request, from `began` to `ended` by `time.perf_counter`.

    `name` is `tokenize`, `queue`, `forward` or `render`, and `model` the model it was for. A
    `forward` lasts from the first batch that held a part of the request to the last; of that the
    device worked for `device_seconds`.
    """

    name: str
    began: float
    ended: float
    model: str | None = None
    device_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds that a request spent in each stage; `queue` is all waiting outside a forward."""

    tokenize: float
    queue: float
    inference: float
    total: float
    stages: tuple[Stage, ...] = ()
