"""Classifies a device's errors: out of memory for one batch, or a device that has failed."""

from collections.abc import Callable
from typing import TypeVar

from app.errors import DeviceFailedError, OutOfMemoryError

Result = TypeVar("Result")

_RETRY_AFTER = 30
# Messages of PyTorch's allocators and libraries, and of CUDA's driver, in a plain RuntimeError.
_OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "ALLOC_FAILED",
    "OUT_OF_MEMORY",
    # On a slice of a GPU (MIG) PyTorch may not ask who has the memory that is missing.
    "NVML_SUCCESS ==",
)


class DeviceGuard:
    """Runs calls in a device's threads, and turns errors of the device into the engine's own."""

    def __init__(self, free_memory: Callable[[], object]) -> None:
        self._free_memory = free_memory

    def guard(self, call: Callable[[], Result]) -> Result:
        """The result of `call`.

        Raises `OutOfMemoryError`, after freeing memory, if it ran out, and `DeviceFailedError`
        where every later call would fail as well.
        """
        try:
            return call()
        except (MemoryError, RuntimeError) as error:
            if _is_out_of_memory(error):
                pass
            elif _is_lasting(error):
                raise DeviceFailedError(
                    "a device has failed while it computed this", retry_after=_RETRY_AFTER
                ) from error
            else:
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
    return any(message in str(error) for message in _OUT_OF_MEMORY)


def _is_lasting(error: MemoryError | RuntimeError) -> bool:
    """Whether it is an error of the GPU's driver, such as an illegal access.

    CUDA returns it again from every later call of the process.
    """
    return any(each.__name__ == "AcceleratorError" for each in type(error).__mro__)
