"""The device thread: in order, every call answered, replaced when it dies. And its errors."""

import asyncio
import ctypes
import sys
import threading
import weakref
from contextlib import suppress
from functools import partial

import pytest

from smart_embedder.devices.thread import DeviceThread, guarded
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
    await made.close(10)
    for left in [thread for thread in threading.enumerate() if thread.name == "device"]:
        left.join(10)
        assert not left.is_alive()


async def test_a_call_runs_on_the_thread_and_its_result_or_its_error_comes_back(thread) -> None:
    assert await thread.run(lambda: threading.current_thread().name) == "device"
    with pytest.raises(ZeroDivisionError):
        await thread.run(lambda: 1 / 0)
    assert await thread.run(lambda: 7) == 7


async def test_an_idle_thread_keeps_nothing_of_its_last_call(thread) -> None:
    """What it held may be a model that is to be unloaded."""

    class Held:
        pass

    held, gone = Held(), asyncio.Event()
    loop = asyncio.get_running_loop()
    weakref.finalize(held, loop.call_soon_threadsafe, gone.set)
    await thread.run(partial(id, held))
    del held
    async with asyncio.timeout(10):
        await gone.wait()


async def test_a_thread_that_ended_is_told_and_replaced_by_one_that_is_prepared_as_it_was() -> None:
    prepared: list[int] = []
    thread = DeviceThread("device", lambda: prepared.append(threading.get_ident()))
    with pytest.raises(InferenceError, match="device thread ended"):
        await thread.run(sys.exit)
    ident = await thread.run(threading.get_ident)
    assert prepared[1:] == [ident]
    # One that is killed while it is idle, too.
    victim = await thread.run(threading.current_thread)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(victim.ident), ctypes.py_object(SystemExit)
    )
    # It dies as soon as it runs again: with this call in hand, or just after it.
    with suppress(InferenceError):
        await thread.run(lambda: 7)
    victim.join(10)
    assert await thread.run(lambda: 8) == 8
    await thread.close(10)
    assert len(prepared) == 3


async def pending(thread: DeviceThread, count: int) -> None:
    """Wait until so many calls are under way or wait."""
    while len(thread._pending) < count:  # noqa: ASYNC110 - turns, not time
        await asyncio.sleep(0)


async def test_a_call_that_preempts_runs_where_another_lets_it_in_and_only_one_deep(thread) -> None:
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
    assert not run_preempting_call(), "no other thread runs them"
    waits.set()
    await asyncio.gather(*calls)
    assert order == ["a", "outer", "b"]


async def test_calls_that_were_to_preempt_end_with_their_thread() -> None:
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
    assert not await thread.run(run_preempting_call), "it was answered"
    await thread.close(10)


async def test_a_call_whose_caller_has_left_before_it_began_is_not_run() -> None:
    thread, waits, ran = DeviceThread("device"), threading.Event(), list[int]()
    held = asyncio.create_task(thread.run(waits.wait))
    left = asyncio.create_task(thread.run(lambda: ran.append(1)))
    await pending(thread, 2)
    left.cancel()
    await asyncio.wait({left})
    waits.set()
    await held
    assert await thread.run(lambda: 7) == 7
    await thread.close(10)
    assert ran == []
    assert not thread._pending


# What an error of a device means: of one batch, of its memory, or of the device.


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
    type("AcceleratorError", (RuntimeError,), {})("CUDA error: out of memory"),
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


@pytest.mark.parametrize(
    ("error", "expected"),
    [*((error, OutOfMemoryError) for error in MEMORY), *OTHERS],
    ids=lambda case: str(case)[-30:],
)
def test_an_error_is_that_of_its_batch_or_of_the_device_or_tells_of_memory_that_is_freed(
    error, expected
) -> None:
    def call() -> None:
        raise error

    freed: list[str] = []
    with pytest.raises(expected) as raised:
        guarded(call, lambda: freed.append("freed"))
    assert raised.type is expected
    is_memory = expected is OutOfMemoryError
    assert freed == ["freed"] * is_memory
    if is_memory or expected is DeviceFailedError:
        assert raised.value.retry_after == 30
    if is_memory:
        told = raised.value.__cause__, raised.value.__context__
        assert told == (None, None), "it keeps tensors alive"
    elif raised.value is not error:
        assert raised.value.__cause__ is error


def test_what_succeeds_is_returned_and_frees_nothing() -> None:
    freed: list[str] = []
    assert guarded(lambda: 7, lambda: freed.append("freed")) == 7
    assert freed == []
