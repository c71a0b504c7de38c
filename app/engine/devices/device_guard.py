"""Classifies a device's errors: of one batch, out of memory, or a device that has failed."""

from collections.abc import Callable
from typing import TypeVar

from app.errors import DeviceCrashedError, DeviceFailedError, OutOfMemoryError

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
# Numbers of CUDA's runtime, which HIP's are alike. After some errors the device computes on: wrong
# arguments, no kernel for this GPU, too few resources for a launch, not supported, a capture.
_PASSING = frozenset({1, 9, 98, 209, 222, 400, 600, 701, 720, 801, *range(900, 909), 910, 912})
# Others come from the device itself, whatever it computes: it is taken, gone, lost to another
# process, or its memory or its links are broken.
_OF_HARDWARE = frozenset({46, 100, 101, 201, 214, 220, 709, 806, 810, 911, 999})


class DeviceGuard:
    """Runs calls in a device's threads, and turns errors of the device into the engine's own."""

    def __init__(self, free_memory: Callable[[], object]) -> None:
        self._free_memory = free_memory

    def guard(self, call: Callable[[], Result]) -> Result:
        """The result of `call`.

        Raises `OutOfMemoryError`, after freeing memory, if it ran out. Where every later call would
        fail as well it raises `DeviceFailedError`, or `DeviceCrashedError` if what was computed may
        be the cause.
        """
        try:
            return call()
        except (MemoryError, RuntimeError) as error:
            if _is_out_of_memory(error):
                pass
            elif not _is_of_accelerator(error) or _code_of(error) in _PASSING:
                raise
            elif _code_of(error) in _OF_HARDWARE:
                raise DeviceFailedError(
                    "a device has failed while it computed this", retry_after=_RETRY_AFTER
                ) from error
            else:
                raise DeviceCrashedError(
                    "a device has failed while it computed this, which may be the cause and is "
                    "computed on no other"
                ) from error
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


def _is_of_accelerator(error: MemoryError | RuntimeError) -> bool:
    """Whether it is an error of the GPU's driver or runtime."""
    return any(each.__name__ == "AcceleratorError" for each in type(error).__mro__)


def _code_of(error: MemoryError | RuntimeError) -> int | None:
    """Its number, which PyTorch adds to errors that it raises itself."""
    code = getattr(error, "error_code", None)
    return code if isinstance(code, int) else None
