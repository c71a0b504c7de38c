"""What became of the requests of every fault test: `pytest tests/faults --fault-table FILE`.

A test's counts are noted when they begin and read when the test is over, passed or not.
"""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields


@dataclass(frozen=True, slots=True)
class Row:
    """Requests by their end: `failed` with a clear error, `left` on purpose, `lost` without any."""

    sent: int = 0
    answered: int = 0
    refused: int = 0
    failed: int = 0
    left: int = 0
    lost: int = 0
    reset: int = 0
    wrong: int = 0

    def __add__(self, other: "Row") -> "Row":
        return Row(*map(sum, zip(astuple(self), astuple(other), strict=True)))


def row_of(sent: int, statuses: Sequence[int]) -> Row:
    """For a client that read these statuses; what has none is lost."""
    answered = statuses.count(200)
    refused = len(statuses) - answered
    return Row(sent, answered, refused, lost=sent - len(statuses))


_open: list[Callable[[], Row]] = []


def record(row: Callable[[], Row]) -> None:
    """Ask for these counts when the present test is over."""
    _open.append(row)


def collect() -> Row:
    """The sum of what was recorded since the last time."""
    total = sum((row() for row in _open), Row())
    _open.clear()
    return total


def as_markdown(rows: dict[str, Row]) -> str:
    """A table with a line for each case, and their sum."""
    names = [field.name for field in fields(Row)]
    lines = [f"| case | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    for case, row in (rows | {"**together**": sum(rows.values(), Row())}).items():
        lines.append(f"| {case} | {' | '.join(map(str, astuple(row)))} |")
    return "\n".join(lines) + "\n"
