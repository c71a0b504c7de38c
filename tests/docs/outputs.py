"""Compares the output that a page shows with what was really printed."""

import re
from typing import Any

GAP = "..."
_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?")


def check_json(shown: Any, printed: Any) -> None:
    """Every field shown must have been printed, with a value of the same type."""
    assert is_part(shape(shown), shape(printed)), f"{shape(shown)}\n{shape(printed)}"


def shape(value: Any) -> Any:
    """The keys and types of a JSON value; of a list those of its first item."""
    match value:
        case dict():
            return {"#" if key.isdecimal() else key: shape(item) for key, item in value.items()}
        case list():
            return [shape(item) for item in value[:1]]
        case bool() | None | str():
            return type(value).__name__
        case _:
            return "number"


def is_part(part: Any, whole: Any) -> bool:
    """Whether `whole` has everything that `part` has."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(key in whole and is_part(item, whole[key]) for key, item in part.items())
    if isinstance(part, list) and isinstance(whole, list):
        return not part or (bool(whole) and is_part(part[0], whole[0]))
    return bool(part == whole)


def check_lines(shown: str, printed: str) -> None:
    """The lines follow each other; before the first one, and where `...` stands, others may.

    Numbers and the width of spaces may differ.
    """
    real = [_plain(line) for line in printed.splitlines()]
    place, gap = 0, True
    for line in shown.splitlines():
        if line.strip() == GAP:
            gap = True
            continue
        wanted = _plain(line)
        found = next((i for i in range(place, len(real)) if real[i] == wanted), None)
        assert found is not None, f"{line!r} is not in\n{printed}"
        assert gap or found == place, f"something stands before {line!r} in\n{printed}"
        place, gap = found + 1, False


def _plain(line: str) -> str:
    return " ".join(_NUMBER.sub("#", line).split())
