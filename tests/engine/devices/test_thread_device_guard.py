"""What an error of a device means: of one batch, of its memory, or of the device."""

import pytest

from smart_embedder.engine.devices.thread import DeviceGuard
from smart_embedder.errors import DeviceCrashedError, DeviceFailedError, OutOfMemoryError


class AcceleratorError(RuntimeError):
    """Has the name of PyTorch's."""

    def __init__(self, code: object) -> None:
        super().__init__("CUDA error")
        self.error_code = code


class VendorError(AcceleratorError):
    """A subclass of it."""


def named(name: str, message: str = "no") -> RuntimeError:
    error: RuntimeError = type(name, (RuntimeError,), {})(message)
    return error


MEMORY = [
    MemoryError(),
    named("OutOfMemoryError"),
    RuntimeError("CUDA out of memory. Tried to allocate"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling"),
    RuntimeError("CUDA_ERROR_OUT_OF_MEMORY"),
    RuntimeError("NVML_SUCCESS == r INTERNAL ASSERT FAILED"),
]
OTHERS = [
    (RuntimeError("shapes do not match"), RuntimeError),
    (ValueError("out of memory"), ValueError),
    # Wrong arguments and configurations, kernels that this GPU has not, what is not ready, not
    # supported, or in the way of a capture.
    *((AcceleratorError(code), AcceleratorError) for code in (1, 9, 98, 209, 222, 400, 600, 701)),
    *((AcceleratorError(code), AcceleratorError) for code in (720, 801, 900, 905, 908, 910, 912)),
    # Reads outside the memory, traps, and whatever nobody has heard of.
    *((AcceleratorError(code), DeviceCrashedError) for code in (2, 8, 10, 700, 899, 909, 913)),
    (AcceleratorError(214), DeviceFailedError),
    (VendorError(46), DeviceFailedError),
    (AcceleratorError(719), DeviceCrashedError),
    (AcceleratorError(None), DeviceCrashedError),
    (AcceleratorError("214"), DeviceCrashedError),
]


def guarded(error: BaseException | None) -> tuple[list[str], BaseException | None]:
    """What is raised for it, and whether memory was freed."""
    freed = list[str]()

    def call() -> int:
        if error is not None:
            raise error
        return 7

    try:
        assert DeviceGuard(lambda: freed.append("freed")).guard(call) == 7
    except BaseException as raised:  # noqa: BLE001 - the test looks at it
        return freed, raised
    return freed, None


@pytest.mark.parametrize("error", MEMORY, ids=str)
def test_too_little_memory_is_freed_and_told_without_what_holds_it(error: BaseException) -> None:
    freed, raised = guarded(error)
    assert freed == ["freed"]
    assert isinstance(raised, OutOfMemoryError)
    assert raised.retry_after == 30
    assert (raised.__cause__, raised.__context__) == (None, None), "it keeps tensors alive"


@pytest.mark.parametrize(("error", "expected"), OTHERS, ids=lambda case: str(case)[-30:])
def test_an_error_of_the_device_is_told_from_one_of_the_batch(error, expected) -> None:
    freed, raised = guarded(error)
    assert freed == []
    assert type(raised) is expected
    if expected is DeviceFailedError:
        assert raised.retry_after == 30
    if raised is not error:
        assert raised.__cause__ is error


def test_what_succeeds_is_returned_and_frees_nothing() -> None:
    assert guarded(None) == ([], None)
