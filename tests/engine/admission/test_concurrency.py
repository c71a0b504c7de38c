"""Permits, divided fairly between the clients that want them."""

import asyncio

import pytest

from app.engine.admission.concurrency import ConcurrencyLimit, FairSemaphore
from app.errors import QueueFullError


def limit_of(capacity: int, acquire_timeout: float = 0.01) -> ConcurrencyLimit:
    return ConcurrencyLimit(capacity, acquire_timeout, "the queue is full", lambda: 7)


class Holder:
    """A request inside the limit, until it is let go."""

    def __init__(self, limit: ConcurrencyLimit, client: str) -> None:
        self._gate = asyncio.Event()
        self.inside = asyncio.Event()
        self.task = asyncio.create_task(self._run(limit, client))

    async def _run(self, limit: ConcurrencyLimit, client: str) -> str:
        async with limit.hold(client):
            self.inside.set()
            await self._gate.wait()
        return client

    async def let_go(self) -> str:
        self._gate.set()
        return await self.task


async def holders(limit: ConcurrencyLimit, clients: str) -> list[Holder]:
    made = [Holder(limit, client) for client in clients]
    for each in made:
        await each.inside.wait()
    return made


async def test_who_finds_no_permit_in_time_is_refused_and_told_when_to_come_back() -> None:
    limit = limit_of(1)
    (held,) = await holders(limit, "a")
    with pytest.raises(QueueFullError) as refused:
        await Holder(limit, "a").task
    assert refused.value.retry_after == 7
    await held.let_go()
    assert limit.held == 0


async def test_a_waiting_request_has_the_permit_as_soon_as_it_is_free() -> None:
    limit = limit_of(1, acquire_timeout=30)
    (held,) = await holders(limit, "a")
    waiting = Holder(limit, "a")
    await held.let_go()
    await waiting.inside.wait()
    assert limit.held == 1
    await waiting.let_go()


async def test_when_it_is_full_the_newest_request_of_the_largest_holder_gives_way() -> None:
    limit = limit_of(4, acquire_timeout=30)
    alices = await holders(limit, "aaaa")
    waiting = [Holder(limit, "a") for _ in range(9)]
    await asyncio.sleep(0)
    bob = Holder(limit, "b")
    await bob.inside.wait()
    assert not any(each.inside.is_set() for each in waiting)
    for each in waiting:
        each.task.cancel()
    with pytest.raises(QueueFullError):
        await alices[-1].task
    assert [each.task.done() for each in alices] == [False, False, False, True]
    for each in (*alices[:-1], bob):
        await each.let_go()
    assert limit.held == 0


async def test_a_permit_is_not_taken_from_a_client_that_would_be_worse_off_then() -> None:
    limit = limit_of(2)
    both = await holders(limit, "ab")
    for client in "abc":
        with pytest.raises(QueueFullError):
            await Holder(limit, client).task
    for each in both:
        await each.let_go()


async def test_a_timeout_inside_stays_a_timeout() -> None:
    with pytest.raises(TimeoutError):
        async with limit_of(1).hold("a"):
            raise TimeoutError


async def test_who_is_cancelled_while_waiting_leaves_no_trace() -> None:
    limit = limit_of(1, acquire_timeout=30)
    (held,) = await holders(limit, "a")
    leaving, staying = Holder(limit, "a"), Holder(limit, "a")
    await asyncio.sleep(0)
    leaving.task.cancel()
    await held.let_go()
    await staying.inside.wait()
    await staying.let_go()
    assert limit.held == 0


async def test_a_client_that_holds_less_goes_before_one_that_has_waited_longer() -> None:
    permits = FairSemaphore(2)
    order: list[str] = []

    async def hold(client: str) -> None:
        await permits.acquire(client)
        order.append(client)

    await permits.acquire("a")
    await permits.acquire("a")
    waiting = [asyncio.create_task(hold(client)) for client in "aab"]
    await asyncio.sleep(0)
    permits.release("a")
    await asyncio.sleep(0)
    assert order == ["b"]
    permits.release("a")
    permits.release("b")
    await asyncio.gather(*waiting)
    assert order == ["b", "a", "a"]


async def test_a_permit_handed_to_someone_who_is_cancelled_in_the_same_moment_is_not_lost() -> None:
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
