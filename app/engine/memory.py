"""Telling too little memory from other failures of a device."""

from collections.abc import Callable
from typing import TypeVar

from app.errors import OutOfMemoryError

Result = TypeVar("Result")
_RETRY_AFTER = 30
# What PyTorch's allocators and libraries say in a plain RuntimeError.
_MESSAGES = ("out of memory", "can't allocate memory", "ALLOC_FAILED")


class MemoryGuard:
    """Runs what may need more memory than there is; belongs to a device's threads."""

    def __init__(self, free_memory: Callable[[], object]) -> None:
        self._free_memory = free_memory

    def guard(self, call: Callable[[], Result]) -> Result:
        """What `call` returns; raises `OutOfMemoryError`, the memory freed, where it was short."""
        try:
            return call()
        except Exception as error:
            if not _is_out_of_memory(error):
                raise
        # Outside the handler, where the error no longer keeps the failed forward's tensors.
        self._free_memory()
        raise OutOfMemoryError(
            "the device has too little memory for this", retry_after=_RETRY_AFTER
        )


def _is_out_of_memory(error: Exception) -> bool:
    """Told by name and words: the engine does not import torch."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(w in str(error) for w in _MESSAGES)
