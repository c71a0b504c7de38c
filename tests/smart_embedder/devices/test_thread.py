"""The device thread: calls in order, preempting calls, replacement; and the errors of devices."""

import asyncio
import ctypes
import sys
import threading
import weakref
from contextlib import suppress
from functools import partial

import pytest

from smart_embedder.devices.thread import DeviceThread, run_guarded
from smart_embedder.errors import (
    DeviceCrashedError,
    DeviceFailedError,
    InferenceError,
    OutOfMemoryError,
)
from smart_embedder.interrupts import run_preempting_call
from tests.simulation.plain import AcceleratorError


@pytest.fixture
async def thread():
    made = DeviceThread("device")
    yield made
    await made.close(500)
    for left in [thread for thread in threading.enumerate() if thread.name == "device"]:
        left.join(500)
        assert not left.is_alive()


async def test_a_call_runs_on_the_thread_and_returns_its_result_or_raises_its_error(thread) -> None:
    assert await thread.run(lambda: threading.current_thread().name) == "device"
    with pytest.raises(ZeroDivisionError):
        await thread.run(lambda: 1 / 0)
    assert await thread.run(lambda: 7) == 7


class Held:
    """What a call references, such as a model."""


async def test_a_thread_does_not_reference_a_call_whose_result_is_there(thread) -> None:
    """The call may reference a model that is unloaded next."""
    held = Held()
    reference = weakref.ref(held)
    await thread.run(partial(id, held))
    del held
    assert reference() is None


async def test_an_idle_thread_does_not_reference_the_result_of_its_last_call(thread) -> None:
    """The result may be a loaded model."""
    held, gone = await thread.run(Held), asyncio.Event()
    loop = asyncio.get_running_loop()
    weakref.finalize(held, loop.call_soon_threadsafe, gone.set)
    del held
    async with asyncio.timeout(500):
        await gone.wait()


async def test_a_thread_that_ended_fails_its_calls_and_is_replaced_and_initialized() -> None:
    prepared: list[int] = []
    thread = DeviceThread("device", lambda: prepared.append(threading.get_ident()))
    with pytest.raises(InferenceError, match="device thread ended"):
        await thread.run(sys.exit)
    ident = await thread.run(threading.get_ident)
    assert prepared[1:] == [ident]
    # Kill an idle thread.
    victim = await thread.run(threading.current_thread)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(victim.ident), ctypes.py_object(SystemExit)
    )
    # It dies as soon as it runs again: during this call, or just after it.
    with suppress(InferenceError):
        await thread.run(lambda: 7)
    victim.join(500)
    assert await thread.run(lambda: 8) == 8
    await thread.close(500)
    assert len(prepared) == 3


async def pending(thread: DeviceThread, count: int) -> None:
    """Wait until so many calls are running or waiting."""
    while len(thread._pending) < count:  # noqa: ASYNC110 - turns, not time
        await asyncio.sleep(0)


async def test_a_preempting_call_runs_within_another_but_not_within_a_preempting_one(
    thread,
) -> None:
    order: list[str] = []
    waits = threading.Event()

    def outer() -> None:
        waits.wait()
        assert run_preempting_call()
        order.append("outer")

    def inner(name: str) -> None:
        assert not run_preempting_call()
        order.append(name)

    calls = [asyncio.create_task(thread.run(outer))]
    calls += [asyncio.create_task(thread.run(partial(inner, name), preempts=True)) for name in "ab"]
    await pending(thread, 3)
    assert not run_preempting_call(), "another thread runs none"
    waits.set()
    await asyncio.gather(*calls)
    assert order == ["a", "outer", "b"]


async def test_preempting_calls_fail_when_their_thread_ends() -> None:
    thread, waits = DeviceThread("device"), threading.Event()

    def ends() -> None:
        waits.wait()
        sys.exit()

    held = asyncio.create_task(thread.run(ends))
    preempting = asyncio.create_task(thread.run(lambda: 7, preempts=True))
    await pending(thread, 2)
    waits.set()
    for call in (held, preempting):
        with pytest.raises(InferenceError):
            await call
    assert not await thread.run(run_preempting_call), "none is left"
    await thread.close(500)


async def test_a_call_that_is_cancelled_before_it_begins_is_not_run() -> None:
    thread, waits, ran = DeviceThread("device"), threading.Event(), list[int]()
    held = asyncio.create_task(thread.run(waits.wait))
    left = asyncio.create_task(thread.run(lambda: ran.append(1)))
    await pending(thread, 2)
    left.cancel()
    await asyncio.wait({left})
    waits.set()
    await held
    assert await thread.run(lambda: 7) == 7
    await thread.close(500)
    assert ran == []
    assert not thread._pending


# Errors of a batch, of the memory, and of the device.


class VendorError(AcceleratorError):
    """A subclass of PyTorch's error."""


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
    type("AcceleratorError", (RuntimeError,), {})("CUDA error: out of memory"),
    RuntimeError("NVML_SUCCESS == r INTERNAL ASSERT FAILED"),
]
OTHERS = [
    (RuntimeError("shapes do not match"), RuntimeError),
    (ValueError("out of memory"), ValueError),
    # Wrong arguments or configurations, no kernel for this GPU, not ready, not supported, captures.
    *((AcceleratorError(code), AcceleratorError) for code in (1, 9, 98, 209, 222, 400, 600, 701)),
    *((AcceleratorError(code), AcceleratorError) for code in (720, 801, 900, 905, 908, 910, 912)),
    # Reads outside the memory, traps, and unknown codes.
    *((AcceleratorError(code), DeviceCrashedError) for code in (2, 8, 10, 700, 899, 909, 913)),
    (AcceleratorError(214), DeviceFailedError),
    (VendorError(46), DeviceFailedError),
    (AcceleratorError(719), DeviceCrashedError),
    (AcceleratorError(None), DeviceCrashedError),
    (AcceleratorError("214"), DeviceCrashedError),
]


@pytest.mark.parametrize(
    ("error", "expected"),
    [*((error, OutOfMemoryError) for error in MEMORY), *OTHERS],
    ids=lambda case: str(case)[-30:],
)
def test_run_guarded_converts_errors_of_devices_and_frees_memory(error, expected) -> None:
    def call() -> None:
        raise error

    freed: list[str] = []
    with pytest.raises(expected) as raised:
        run_guarded(call, lambda: freed.append("freed"))
    assert raised.type is expected
    is_memory = expected is OutOfMemoryError
    assert freed == ["freed"] * is_memory
    if is_memory or expected is DeviceFailedError:
        assert raised.value.retry_after == 30
    if is_memory:
        chained = raised.value.__cause__, raised.value.__context__
        assert chained == (None, None), "they would keep tensors alive"
    elif raised.value is not error:
        assert raised.value.__cause__ is error


def test_run_guarded_returns_the_result_and_frees_no_memory() -> None:
    freed: list[str] = []
    assert run_guarded(lambda: 7, lambda: freed.append("freed")) == 7
    assert freed == []
