"""Taking the vectors of one sequence out of what a forward made for all."""

from dataclasses import dataclass

from app.engine.types import FloatArray
from app.models.batch.selection import Spans
from app.models.device.transfer import HostRows


@dataclass(frozen=True, slots=True)
class KindRows:
    """What the device made of one kind of vectors, and where each sequence's rows of it lie."""

    rows: HostRows
    spans: Spans

    def finite(self, index: int) -> bool:
        """Whether all numbers of one sequence are finite; true where it has none."""
        span = self.spans[index]
        return span is None or bool(self.rows.finite[span].all())

    def of(self, index: int, skip: int = 0) -> FloatArray | None:
        """The rows of one sequence without the first `skip`; None where it has none."""
        span = self.spans[index]
        return None if span is None else self.rows.values[span.start + skip : span.stop]
