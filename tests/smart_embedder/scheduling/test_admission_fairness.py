"""Permits, divided fairly between clients."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smart_embedder.errors import QueueFullError
from smart_embedder.interrupts import failing_with
from smart_embedder.scheduling.admission import ConcurrencyLimit, FairSemaphore
from tests.support.skipped_time import in_skipped_time, now, run_ready


def limit_of(capacity: int, acquire_timeout: float = 0.01) -> ConcurrencyLimit:
    return ConcurrencyLimit(capacity, acquire_timeout, "the queue is full", lambda: 7)


class Holder:
    """A request that holds a permit until `release` is called."""

    def __init__(self, limit: ConcurrencyLimit, client: str) -> None:
        self._gate = asyncio.Event()
        self.inside = asyncio.Event()
        self.task = asyncio.create_task(self._run(limit, client))

    async def _run(self, limit: ConcurrencyLimit, client: str) -> str:
        async with limit.hold(client):
            self.inside.set()
            await self._gate.wait()
        return client

    async def release(self) -> str:
        self._gate.set()
        return await self.task


async def start_holders(limit: ConcurrencyLimit, clients: str) -> list[Holder]:
    holders = [Holder(limit, client) for client in clients]
    for holder in holders:
        await holder.inside.wait()
    return holders


@pytest.mark.parametrize(("capacity", "expected"), [(1, 1), (2, 1), (4, 3), (32, 24), (200, 150)])
async def test_a_client_holds_at_most_three_times_the_free_permits(
    capacity: int, expected: int
) -> None:
    limit = FairSemaphore(capacity, times_free=3)
    while limit.try_acquire("a"):
        pass
    assert limit.held_by("a") == expected
    assert limit.try_acquire("b") == (capacity > 1)


async def test_a_client_at_its_limit_waits_until_enough_permits_are_free() -> None:
    limit = limit_of(4, acquire_timeout=30)
    alices = await start_holders(limit, "aaa")
    waiting = Holder(limit, "a")
    (bob,) = await start_holders(limit, "b")
    await bob.release()
    await run_ready()
    assert not waiting.inside.is_set(), "the last permit is for other clients"
    await alices[0].release()
    await waiting.inside.wait()
    for holder in (*alices[1:], waiting):
        await holder.release()
    assert limit.held == 0


async def test_a_released_permit_goes_to_the_waiting_client_that_holds_the_fewest() -> None:
    limit = limit_of(2, acquire_timeout=60)
    a, b = await start_holders(limit, "ab")
    waiting = [Holder(limit, client) for client in "bab"]
    await run_ready()
    await a.release()
    await waiting[1].inside.wait()
    assert (limit.held_by("a"), limit.held_by("b")) == (1, 1)
    for holder in (b, *waiting):
        await holder.release()


async def test_a_permit_given_to_a_waiter_that_is_cancelled_at_once_is_not_lost() -> None:
    permits = FairSemaphore(1)
    await permits.acquire("a")
    waiting = asyncio.create_task(permits.acquire("b"))
    await asyncio.sleep(0)
    permits.release("a")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert permits.held == 0
    assert permits.try_acquire("c")


@in_skipped_time
async def test_a_request_is_refused_after_the_acquire_timeout() -> None:
    limit, began = limit_of(1, acquire_timeout=5), now()
    (held,) = await start_holders(limit, "a")
    with pytest.raises(QueueFullError) as refused:
        await Holder(limit, "a").task
    assert refused.value.retry_after == 7
    assert now() - began == pytest.approx(5, abs=0.01)
    assert (limit.held, limit.held_by("a"), limit.held_by("b")) == (1, 1, 0)
    await held.release()
    assert (limit.held, limit.held_by("a")) == (0, 0)


async def test_a_request_that_fails_releases_its_permit() -> None:
    limit = limit_of(1)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            async with limit.hold("a"):
                raise ZeroDivisionError
    assert limit.held == 0


@given(
    capacity=st.integers(1, 4),
    steps=st.lists(st.tuples(st.sampled_from(["acquire", "cancel", "release"]), st.integers(0, 5))),
)
async def test_no_permit_is_lost_or_given_twice_and_no_client_waits_beside_a_free_one(
    capacity, steps
) -> None:
    permits = FairSemaphore(capacity)
    waiting: list[tuple[str, asyncio.Task[None]]] = []
    holding: list[str] = []
    for step, number in steps:
        if step == "acquire":
            client = "abc"[number % 3]
            waiting.append((client, asyncio.create_task(permits.acquire(client))))
        elif step == "cancel" and waiting:
            waiting[number % len(waiting)][1].cancel()
        elif step == "release" and holding:
            permits.release(holding.pop(number % len(holding)))
        await run_ready(4)
        holding += [client for client, task in waiting if task.done() and not task.cancelled()]
        waiting = [(client, task) for client, task in waiting if not task.done()]
        assert permits.held == len(holding) <= capacity
        assert not waiting or permits.held == capacity
        assert {client: permits.held_by(client) for client in "abc"} == {
            client: holding.count(client) for client in "abc"
        }
    for _, task in waiting:
        task.cancel()
    await run_ready(4)
    assert not permits._waiters, "cancelled waiters are removed"


async def test_clients_that_hold_equally_many_alternate() -> None:
    permits, order = FairSemaphore(1), list[str]()

    async def work(client: str) -> None:
        await permits.acquire(client)
        order.append(client)
        await asyncio.sleep(0)
        permits.release(client)

    await permits.acquire("c")
    tasks = [asyncio.create_task(work(client)) for client in "aaabbb"]
    await run_ready()
    permits.release("c")
    await asyncio.gather(*tasks)
    assert order == list("ababab")


@pytest.mark.parametrize(
    ("ends", "is_cancelled", "expected"),
    [
        (["inner"], False, KeyError),
        (["outer"], False, ValueError),
        (["outer", "inner", "inner"], False, ValueError),
        (["inner"], True, asyncio.CancelledError),
        ([], False, TimeoutError),
    ],
)
async def test_nested_failing_with_blocks_raise_the_error_of_the_outermost_that_ended(
    ends: list[str], is_cancelled: bool, expected: type[BaseException]
) -> None:
    scopes: dict[str, asyncio.Timeout] = {}

    async def work() -> None:
        async with failing_with(ValueError) as outer, failing_with(KeyError) as inner:
            scopes.update(outer=outer, inner=inner)
            if not ends:
                raise TimeoutError("of the work itself")
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await run_ready()
    for name in ends:
        scopes[name].reschedule(0)
    if is_cancelled:
        task.cancel()
    with pytest.raises(expected):
        await task
    assert task.cancelling() == int(is_cancelled)
