"""What a check says when it fails or does not apply."""

import math
from collections.abc import Collection, Sequence
from typing import Any

_LONGEST = 200


class Unexpected(Exception):  # noqa: N818 - what was seen, not an error of this program
    """A check failed; the text says what was expected and what was seen."""

    def __init__(self, what: str, expected: object, seen: object) -> None:
        super().__init__(f"{what}: expected {expected}, saw {_short(seen)}")


class Skip(Exception):  # noqa: N818 - no error at all
    """A check does not apply here; the text says why."""


def expect(what: str, seen: object, expected: object) -> None:
    """Raise `Unexpected` unless both are equal."""
    if seen != expected:
        raise Unexpected(what, _short(expected), seen)


def expect_that(what: str, holds: bool, expected: object, seen: object) -> None:
    """Raise `Unexpected` unless it `holds`."""
    if not holds:
        raise Unexpected(what, expected, seen)


def expect_keys(what: str, seen: Any, keys: Collection[str]) -> None:
    """Raise `Unexpected` unless every key is there."""
    missing = sorted(set(keys) - set(seen))
    expect_that(what, not missing, f"also {', '.join(missing)}", sorted(seen))


def expect_finite(what: str, numbers: Sequence[float]) -> None:
    """Raise `Unexpected` unless there are numbers, each of them finite."""
    finite = bool(numbers) and all(map(math.isfinite, numbers))
    expect_that(what, finite, "finite numbers", numbers)


def expect_unit(what: str, vector: Sequence[float]) -> None:
    """Raise `Unexpected` unless the vector has unit length, as far as half precision goes."""
    expect_finite(what, vector)
    length = math.hypot(*vector)
    expect_that(what, abs(length - 1) < TOLERANCE, "length 1", f"length {length:.4f}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


# Two forwards of one text may differ so much in half precision.
TOLERANCE = 0.02
