"""The engine without HTTP: who waits, who is refused, and who goes first."""

import asyncio

import pytest

from app.errors import (
    LoadingError,
    QueueFullError,
)
from app.observability.metrics import Metrics
from tests.engine.engines import engine_for, hold, let_go, queued, waiting
from tests.engine.fakes import FakeModel


async def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    model, metrics = FakeModel(), Metrics()
    async with engine_for(model, metrics, max_queue_size=1) as engine:
        held = await hold(engine, model)
        waits = asyncio.create_task(engine.embed(["waits"]))
        await waiting(metrics, 1)
        with pytest.raises(QueueFullError) as refused:
            await engine.embed(["refused"])
        assert refused.value.retry_after >= 1
        let_go(model)
        await asyncio.gather(held, waits)
    assert model.batches == [[4], [5]]


async def test_an_urgent_request_goes_before_those_that_wait() -> None:
    model, metrics = FakeModel(), Metrics()
    async with engine_for(model, metrics) as engine:
        held = await hold(engine, model)
        usual = asyncio.create_task(engine.embed(["a" * 8]))
        await queued(engine, tokens=8)
        urgent = asyncio.create_task(engine.embed(["b" * 9], urgency=0))
        await queued(engine, tokens=17)
        let_go(model)
        await asyncio.gather(held, usual, urgent)
    assert model.batches[1:] == [[9], [8]]


async def test_a_cancelled_request_leaves_the_queue_and_its_place() -> None:
    model, metrics = FakeModel(), Metrics()
    async with engine_for(model, metrics, max_queue_size=1) as engine:
        held = await hold(engine, model)
        gone = asyncio.create_task(engine.embed(["gone"]))
        await waiting(metrics, 1)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        assert metrics.value("embedding_queue_size") == 0
        let_go(model)
        await held
        await engine.embed(["next"])
    assert model.batches == [[4], [4]]


async def test_before_the_models_are_loaded_it_refuses() -> None:
    with pytest.raises(LoadingError):
        await engine_for(FakeModel()).embed(["a"])


async def test_a_refused_caller_is_told_the_time_that_the_waiting_work_takes() -> None:
    model, metrics = FakeModel(), Metrics()
    async with engine_for(model, metrics, max_queue_size=1) as engine:
        # The measured rate is not part of the engine's face.
        rate = engine._devices._workers[0].executor.rate
        rate.tokens_per_second = 7.0
        held = await hold(engine, model)
        waits = asyncio.create_task(engine.embed(["a" * 50] * 3))
        await queued(engine, tokens=150)
        with pytest.raises(QueueFullError) as refused:
            await engine.embed(["refused"])
        let_go(model)
        await asyncio.gather(held, waits)
    assert refused.value.retry_after == 22


async def test_a_client_beside_one_that_fills_the_queue_is_never_refused() -> None:
    model, metrics = FakeModel(), Metrics()
    async with engine_for(model, metrics, max_queue_size=4) as engine:
        held = await hold(engine, model)
        alice = [asyncio.create_task(engine.embed(["a"] * 9, client="a")) for _ in range(4)]
        await waiting(metrics, 4)
        bob = asyncio.create_task(engine.embed(["b"], client="b"))
        with pytest.raises(QueueFullError):
            await alice[-1]
        await queued(engine, tokens=3 * 9 + 1)
        let_go(model)
        await asyncio.gather(held, bob, *alice[:-1])
    # Bob was in the first batch that was formed after he came; alone, if it preempted the held one.
    assert len(model.batches[1]) in {1, 10}
