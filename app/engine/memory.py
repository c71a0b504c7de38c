"""Out of memory: recognising it, and the token budget that shrinks and recovers."""

from collections.abc import Callable
from typing import TypeVar

from app.engine.batcher import Limits
from app.errors import OutOfMemoryError

Result = TypeVar("Result")

_RETRY_AFTER = 30
# Messages of PyTorch's allocators and libraries in a plain RuntimeError.
_MESSAGES = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
_RECOVERY_STEPS = 100


class MemoryGuard:
    """Runs calls that may run out of memory, in a device's threads."""

    def __init__(self, free_memory: Callable[[], object]) -> None:
        self._free_memory = free_memory

    def guard(self, call: Callable[[], Result]) -> Result:
        """The result of `call`; raises `OutOfMemoryError`, after freeing memory, if it ran out."""
        try:
            return call()
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
        # Outside the handler: the error keeps the tensors of the failed forward alive.
        self._free_memory()
        raise OutOfMemoryError(
            "the device has too little memory for this", retry_after=_RETRY_AFTER
        )


def _is_out_of_memory(error: MemoryError | RuntimeError) -> bool:
    """Recognised by name and message: the engine does not import torch."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return any(message in str(error) for message in _MESSAGES)


class TokenBudget:
    """The limits of a forward: halved when a batch ran out of memory, then slowly restored."""

    def __init__(
        self, tokens: int, max_sequences: int | None = None, max_requests: int | None = None
    ) -> None:
        self._most = tokens
        self._now = tokens
        self._max_sequences = max_sequences
        self._max_requests = max_requests

    @property
    def limits(self) -> Limits:
        """The limits of the next forward."""
        return Limits(self._now, self._max_sequences, self._max_requests)

    def shrink(self, failed_tokens: int) -> None:
        """Go down to half of what did not fit."""
        self._now = max(1, min(self._now, failed_tokens // 2))

    def recover(self) -> None:
        """After a forward that fitted, go up by a hundredth of the whole budget."""
        self._now = min(self._most, self._now + max(1, self._most // _RECOVERY_STEPS))
