"""The stages of a request, and the interface of a tracer.

Only `smart_embedder.observability.otlp` knows OpenTelemetry.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

Attributes = Mapping[str, str | int | float]


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


class RequestSpan(Protocol):
    """The span of one request, which has been started."""

    @property
    def traceparent(self) -> str | None:
        """The span's W3C trace context, if there is one."""

    def end(self, attributes: Attributes, stages: Sequence[Stage], error: str | None) -> None:
        """End it now, with a child for each stage; `error` is the error's code."""


class Tracer(Protocol):
    """Creates spans and sends them, without blocking the request."""

    def begin(self, name: str, context: Mapping[str, str]) -> RequestSpan:
        """Begin a request's span; `context` holds the W3C headers that the client sent."""

    def close(self) -> None:
        """Send the remaining spans, for a few seconds at most; blocks."""
