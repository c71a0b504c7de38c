"""The engine without HTTP: closing and aborting."""

import asyncio
import threading

import pytest

from smart_embedder.engine.records import EmbedRequest
from smart_embedder.errors import (
    DrainingError,
)
from smart_embedder.observability.metrics import Metrics
from tests.engine.engines import engine_for, hold, let_go, waiting
from tests.engine.fakes import FakeModel


async def test_aborting_tells_everyone_who_still_waits() -> None:
    model, metrics = FakeModel(), Metrics()
    engine = engine_for(model, metrics)
    await engine.start()
    tasks = [await hold(engine, model), asyncio.create_task(engine.embed(EmbedRequest(["waits"])))]
    await waiting(metrics, 1)
    engine.abort()
    for request in (*tasks, engine.embed(EmbedRequest(["late"]))):
        with pytest.raises(DrainingError):
            await request
    let_go(model)
    await engine.close()


async def test_aborting_waits_for_no_tokenizer() -> None:
    """Texts that a tokenizer thread has, that wait for it, and that come later."""
    reads, gate = threading.Event(), threading.Event()

    class Slow(FakeModel):
        def tokenize(self, *arguments, **options):
            reads.set()
            assert gate.wait(60)
            return super().tokenize(*arguments, **options)

    model = Slow()
    engine = engine_for(model, shutdown_timeout=0.05, tokenizer_threads=1)
    await engine.start()
    tasks = [asyncio.create_task(engine.embed(EmbedRequest([f"text {i}"]))) for i in range(5)]
    while not reads.is_set():  # noqa: ASYNC110 - turns, not time
        await asyncio.sleep(0)
    await engine.close()
    assert not gate.is_set()
    for task in tasks:
        with pytest.raises(DrainingError):
            await task
    engine.abort()
    assert not model.batches
    gate.set()


async def test_closing_answers_what_was_accepted_and_refuses_the_rest() -> None:
    model, metrics = FakeModel(), Metrics()
    engine = engine_for(model, metrics)
    await engine.start()
    held = await hold(engine, model)
    accepted = [asyncio.create_task(engine.embed(EmbedRequest([f"text {i}"]))) for i in range(5)]
    await waiting(metrics, 5)
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0)
    with pytest.raises(DrainingError):
        await engine.embed(EmbedRequest(["late"]))
    let_go(model)
    await closing
    results = await asyncio.gather(held, *accepted)
    assert len(results) == 6


async def test_closing_waits_for_a_forward_that_nobody_waits_for() -> None:
    model = FakeModel()
    engine = engine_for(model)
    await engine.start()
    held = await hold(engine, model)
    held.cancel()
    closing = asyncio.create_task(engine.close())
    with pytest.raises(asyncio.CancelledError):
        await held
    assert not closing.done()
    let_go(model)
    await closing
    assert "device" not in {thread.name for thread in threading.enumerate()}


async def test_closing_does_not_wait_for_ever_for_a_device_that_is_stuck() -> None:
    model = FakeModel()
    engine = engine_for(model, shutdown_timeout=0.05)
    await engine.start()
    tasks = [await hold(engine, model), asyncio.create_task(engine.embed(EmbedRequest(["a"])))]
    await engine.close()
    for task in tasks:
        with pytest.raises(DrainingError):
            await task
    let_go(model)
