"""The vectors of one kind that a forward has made, sequence by sequence."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from app.engine.types import FloatArray
from app.models.batch.selection import Spans
from app.models.device.transfer import DeviceRows, HostRows, start_copies


@dataclass(frozen=True, slots=True)
class KindRows:
    """The rows of one kind of vectors; `spans` says which of them belong to each sequence."""

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


def start_kinds(
    kinds: Mapping[str, tuple[DeviceRows, Spans]],
) -> Callable[[], dict[str, KindRows]]:
    """Begin to copy every kind to the host; return a function that waits for the copies."""
    copies = start_copies([rows for rows, _ in kinds.values()])
    spans = [spans for _, spans in kinds.values()]
    return lambda: dict(zip(kinds, map(KindRows, copies(), spans), strict=True))
