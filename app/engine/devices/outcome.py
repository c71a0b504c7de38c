"""An error as a value, for those who must go on or tell somebody else, whatever was raised."""

from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def outcome_of(call: Callable[[], Result]) -> Result | Exception:
    """What `call` returns, or the error that it raises."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - the caller decides what any error means
        return error
