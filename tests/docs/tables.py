"""Tables of the documentation, by the heads of their columns."""

import re
from pathlib import Path

_CELL = re.compile(r"(?<!\\)\|")


def rows_under(file: Path, first: str, *others: str) -> list[list[str]]:
    """The rows of every table in `file` whose head begins with these columns."""
    wanted = [first, *others]
    rows: list[list[str]] = []
    inside = False
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        cells = [cell.strip() for cell in _CELL.split(line)[1:-1]]
        if cells[: len(wanted)] == wanted:
            inside = True
        elif inside and set(line) - set("|-: "):
            rows.append(cells)
    assert rows, f"{file.name} has no table {wanted}"
    return rows


def code_in(cell: str) -> list[str]:
    """What stands between backticks."""
    return re.findall(r"`([^`]+)`", cell)
