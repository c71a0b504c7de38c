"""The device thread: in order, every call answered, replaced when it dies."""

import asyncio
import ctypes
import sys
import threading
import weakref
from contextlib import suppress
from functools import partial

import pytest

from smart_embedder.engine.devices.thread import DeviceThread, DeviceThreads, run_preempting_call
from smart_embedder.errors import InferenceError


@pytest.fixture
async def thread():
    made = DeviceThread("device")
    yield made
    await made.close(10)
    for left in [thread for thread in threading.enumerate() if thread.name == "device"]:
        left.join(10)
        assert not left.is_alive()


async def test_a_call_runs_on_the_thread_and_its_result_comes_back(thread) -> None:
    name = await thread.run(lambda: threading.current_thread().name)
    assert name == "device"


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


async def test_what_a_call_raises_is_raised_to_its_caller_and_to_no_later_one(thread) -> None:
    with pytest.raises(ZeroDivisionError):
        await thread.run(lambda: 1 / 0)
    assert await thread.run(lambda: 7) == 7


async def test_a_call_that_ends_the_thread_is_answered_and_the_next_gets_a_new_one(thread) -> None:
    with pytest.raises(InferenceError, match="device thread ended"):
        await thread.run(sys.exit)
    assert await thread.run(lambda: 7) == 7


async def test_a_thread_that_replaces_another_is_prepared_as_it_was() -> None:
    prepared: list[int] = []
    thread = DeviceThread("device", lambda: prepared.append(threading.get_ident()))
    with pytest.raises(InferenceError):
        await thread.run(sys.exit)
    ident = await thread.run(threading.get_ident)
    await thread.close(10)
    assert len(prepared) == 2
    assert prepared[1] == ident


async def test_a_thread_killed_while_idle_is_replaced(thread) -> None:
    victim = await thread.run(threading.current_thread)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(victim.ident), ctypes.py_object(SystemExit)
    )
    # It dies as soon as it runs again: with this call in hand, or just after it.
    with suppress(InferenceError):
        await thread.run(lambda: 7)
    victim.join(10)
    assert await thread.run(lambda: 8) == 8
    assert not victim.is_alive()


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
    while len(thread._pending) < 3:  # noqa: ASYNC110 - turns, not time
        await asyncio.sleep(0)
    waits.set()
    await asyncio.gather(*calls)
    assert order == ["a", "outer", "b"]


async def test_no_other_thread_runs_what_preempts(thread) -> None:
    waits = threading.Event()
    held = asyncio.create_task(thread.run(waits.wait))
    preempting = asyncio.create_task(thread.run(lambda: 7, preempts=True))
    while len(thread._pending) < 2:  # noqa: ASYNC110 - turns, not time
        await asyncio.sleep(0)
    assert not run_preempting_call()
    waits.set()
    assert await preempting == 7
    await held


class Calls:
    """Launches, and collects what was launched; knows on which threads."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.gate = threading.Event()

    def launch(self):
        self.threads.append(threading.current_thread().name)
        return self.collect

    def collect(self) -> int:
        self.threads.append(threading.current_thread().name)
        self.gate.wait()
        return 7


async def test_a_gpu_launches_on_one_thread_and_collects_on_another() -> None:
    threads = DeviceThreads(DeviceThread("launches"), DeviceThread("collects"))
    assert (threads.preemptible, threads.most_batches) == (False, 2)
    calls, launched = Calls(), asyncio.Event()
    computing = asyncio.create_task(threads.compute(calls.launch, launched))
    await asyncio.wait_for(launched.wait(), 60)
    assert not computing.done()
    calls.gate.set()
    assert await computing == 7
    assert calls.threads == ["launches", "collects"]
    await threads.close(10)
    assert threads.launching._thread is threads.collecting._thread is None


async def test_a_cpu_computes_on_one_thread_and_another_call_may_come_between() -> None:
    threads = DeviceThreads(DeviceThread("computes"))
    assert (threads.preemptible, threads.most_batches) == (True, 1)
    calls, launched = Calls(), asyncio.Event()
    calls.gate.set()
    assert await threads.compute(calls.launch, launched) == 7
    assert calls.threads == ["computes"] * 2
    assert not launched.is_set(), "it is launched when it is done"
    within = Calls()
    within.gate.set()
    inner = asyncio.create_task(threads.compute(within.launch, launched, preempts=True))
    assert await inner == 7
    await threads.close(10)


async def test_calls_that_were_to_preempt_end_with_their_thread() -> None:
    thread, waits = DeviceThread("device"), threading.Event()

    def ends() -> None:
        waits.wait()
        sys.exit()

    held = asyncio.create_task(thread.run(ends))
    preempting = asyncio.create_task(thread.run(lambda: 7, preempts=True))
    while len(thread._pending) < 2:  # noqa: ASYNC110 - turns, not time
        await asyncio.sleep(0)
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
    while len(thread._pending) < 2:  # noqa: ASYNC110 - turns, not time
        await asyncio.sleep(0)
    left.cancel()
    await asyncio.wait({left})
    waits.set()
    await held
    assert await thread.run(lambda: 7) == 7
    await thread.close(10)
    assert ran == []
    assert not thread._pending
