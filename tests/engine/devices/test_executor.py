"""A device that computes while the next batch is launched: what overlaps, and what does not."""

import asyncio
import time

import pytest

from app.engine import Engine
from app.errors import InferenceError, InferenceTimeoutError
from app.settings import Settings
from tests.engine.fakes import FakeModel, loaded


@pytest.fixture
def model() -> FakeModel:
    """Computes while others are launched, as a GPU does; every forward waits at the gate."""
    model = FakeModel()
    model.asynchronous = model.held = True
    return model


def engine_of(model: FakeModel, **settings: float) -> Engine:
    return Engine(Settings(**settings), loader=lambda _: loaded(model))


def request(engine: Engine, letter: str) -> "asyncio.Task[float]":
    """Embed a text as long as the token budget: it is a batch of its own."""

    async def embed() -> float:
        result = await engine.embed([letter * 10])
        return float(result.embeddings[0].dense[0])

    return asyncio.create_task(embed())


async def launched(model: FakeModel) -> None:
    await asyncio.to_thread(model.entered.acquire)


async def test_the_next_batch_is_launched_before_the_results_of_the_last_are_back(model) -> None:
    async with engine_of(model) as engine:
        requests = [request(engine, letter) for letter in "abcd"]
        for _ in range(2):
            await launched(model)
        assert not any(each.done() for each in requests)
        for _ in range(4):
            model.gate.release()
        assert await asyncio.gather(*requests) == [970, 980, 990, 1000]


async def test_no_batch_is_formed_before_it_can_be_launched(model) -> None:
    async with engine_of(model) as engine:
        first = [request(engine, letter) for letter in "ab"]
        for _ in range(2):
            await launched(model)
        # Both wait while two batches are on their way, and share the third.
        late = [asyncio.create_task(engine.embed([letter])) for letter in "cd"]
        while engine._queue.waiting_tokens < 2:  # noqa: ASYNC110 - turns, not time
            await asyncio.sleep(0)
        for _ in range(3):
            model.gate.release()
        await asyncio.gather(*first, *late)
    assert model.batches == [[10], [10], [1, 1]]


async def test_results_that_fail_cost_nobody_else_anything(model) -> None:
    model.failures = [RuntimeError("unwell"), None]
    async with engine_of(model) as engine:
        failing, well = request(engine, "a"), request(engine, "b")
        for _ in range(2):
            model.gate.release()
        with pytest.raises(InferenceError):
            await failing
        assert await well == 980


async def test_too_little_memory_is_met_with_halves_once_the_device_is_free(model) -> None:
    async with engine_of(model) as engine:
        first = request(engine, "a")
        await launched(model)
        model.failures = [None, MemoryError()]
        second = asyncio.create_task(engine.embed(["bbbbb", "ccccc"]))
        for _ in range(4):
            model.gate.release()
        result = await second
        assert await first == 970
    assert [each.dense[0] for each in result.embeddings] == [490, 495]
    assert model.batches == [[10], [5, 5], [5], [5]]


async def test_a_forward_that_waits_for_the_one_before_has_its_time_limit_still(model) -> None:
    async with engine_of(model, gpu_process_timeout=0.2) as engine:
        slow, behind = request(engine, "a"), request(engine, "b")
        for _ in range(2):
            await launched(model)
        with pytest.raises(InferenceTimeoutError):
            await slow
        assert not behind.done()
        for _ in range(2):
            model.gate.release()
        assert await behind == 980


async def test_seconds_on_the_device_are_counted_once(model) -> None:
    began = time.perf_counter()
    async with engine_of(model) as engine:
        requests = [asyncio.create_task(engine.embed([letter * 10])) for letter in "ab"]
        for _ in range(2):
            await launched(model)
        for _ in range(2):
            model.gate.release()
        results = await asyncio.gather(*requests)
    elapsed = time.perf_counter() - began
    assert sum(result.timings.inference for result in results) <= elapsed


async def test_an_abort_reaches_every_batch_on_its_way(model) -> None:
    engine = engine_of(model, shutdown_timeout=1)
    await engine.start()
    requests = [request(engine, letter) for letter in "abc"]
    for _ in range(2):
        await launched(model)
    engine.abort()
    results = await asyncio.gather(*requests, return_exceptions=True)
    assert [type(each).__name__ for each in results] == ["DrainingError"] * 3
    for _ in range(2):
        model.gate.release()
    await engine.close()
