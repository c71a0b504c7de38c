"""What a check raises when it fails or does not apply."""

import math
from collections.abc import Sequence

_MAX_CHARACTERS = 200
# Two forwards of one text may differ so much in half precision.
TOLERANCE = 0.02


class CheckFailedError(AssertionError):
    """A check failed; the text says what was expected and what was seen."""

    def __init__(self, what: str, expected: object, seen: object) -> None:
        super().__init__(f"{what}: expected {expected}, saw {_shorten(seen)}")


class Skip(Exception):  # noqa: N818 - no error
    """A check does not apply here; the text says why."""


def expect(what: str, seen: object, expected: object) -> None:
    """Raise `CheckFailedError` unless both are equal."""
    expect_that(what, seen == expected, _shorten(expected), seen)


def expect_that(what: str, holds: object, expected: object, seen: object) -> None:
    """Raise `CheckFailedError` unless the condition `holds`."""
    if not holds:
        raise CheckFailedError(what, expected, seen)


def expect_unit(what: str, vector: Sequence[float]) -> None:
    """Raise `CheckFailedError` unless the vector has unit length, as far as half precision goes."""
    length = math.hypot(*vector)
    expect_that(what, abs(length - 1) < TOLERANCE, "length 1", f"length {length:.4f}")


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]} ..."
