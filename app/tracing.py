"""What a trace is to the rest of the service; OpenTelemetry itself is known to `app.otlp` alone."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Protocol

from app.timings import Stage

Attributes = Mapping[str, str | int | float]


class RequestSpan(Protocol):
    """The span of one request, which has begun."""

    @property
    def traceparent(self) -> str | None:
        """W3C trace context that names this span, where there is any."""

    def end(self, attributes: Attributes, stages: Sequence[Stage], error: str | None) -> None:
        """End it now, with a child for each stage; `error` says in a word what failed."""


class Tracer(Protocol):
    """Makes spans and sends them away, without ever holding up who makes them."""

    def begin(self, name: str, context: Mapping[str, str]) -> RequestSpan:
        """Begin a request's span; `context` holds the W3C headers that the client sent."""

    def close(self) -> None:
        """Send what is left, for a few seconds at most; blocks."""


def make_tracer(endpoint: str, service_name: str) -> Tracer:
    """A tracer that sends to the OTLP receiver at `endpoint`, as the service of that name.

    OpenTelemetry's tracing SDK and its exporter are imported here and not with this module: who
    wants no traces does without.
    """
    tracer: Tracer = importlib.import_module("app.otlp").OtlpTracer(endpoint, service_name)
    return tracer
