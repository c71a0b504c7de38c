"""`EngineCore`: refusals, failures, startup, statuses and closing."""

import asyncio
import gc
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from structlog.testing import capture_logs

from smart_embedder.core import EngineCore
from smart_embedder.errors import (
    DrainingError,
    EmptyInputError,
    InferenceError,
    LoadingError,
    OutOfMemoryError,
    QueueFullError,
    StartupError,
    UnhealthyError,
)
from smart_embedder.interface import DefaultModels, Measured, ModelInfo, ModelState
from smart_embedder.pipelines.reranking import RerankRequest
from smart_embedder.requests import EmbedRequest
from smart_embedder.settings import EngineSettings
from tests.smart_embedder.engines import engine_for, entered, hold, let_go, queued
from tests.smart_embedder.fakes import ALL, FakeModel, FakeReranker, loaded, loading, settings_of


async def test_a_request_without_texts_is_refused() -> None:
    async with engine_for(FakeModel()) as engine:
        with pytest.raises(EmptyInputError):
            await engine.embed(EmbedRequest([]))


async def test_full_queues_are_refused_by_purpose_with_the_estimated_retry_after(
    monkeypatch,
) -> None:
    """An embedding request releases its permit when it is taken, a rerank request when scored."""
    monkeypatch.setattr("smart_embedder.core._ACQUIRE_TIMEOUT", 0.01)
    model, reranker = FakeModel(), FakeReranker()
    settings = {"max_queue_size": 1, "rerank_max_queue": 1, "seconds_per_token": 3.0}
    async with engine_for(model, reranker=reranker, **settings) as engine:
        held = await hold(engine, model)
        waits = asyncio.create_task(engine.embed(EmbedRequest(["waits"])))
        await queued(engine, 5)
        scored = asyncio.create_task(engine.rerank(RerankRequest("q", ["a" * 4])))
        await queued(engine, 5 + 5)
        with pytest.raises(QueueFullError, match="1 embedding requests wait") as refused:
            await engine.embed(EmbedRequest(["refused"]))
        with pytest.raises(QueueFullError, match="1 rerank requests are in work") as not_scored:
            await engine.rerank(RerankRequest("q", ["refused"]))
        let_go(model)
        await asyncio.gather(held, waits, scored)
    assert 2 <= refused.value.retry_after <= 13
    assert 2 <= not_scored.value.retry_after <= 30


async def test_an_error_in_the_consumer_makes_the_engine_unhealthy(monkeypatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    engine = engine_for(FakeModel())
    await engine.start()
    monkeypatch.setattr("smart_embedder.scheduling.queue.JobQueue.take", broken)
    # A waiting request fails, and so does a later one.
    with capture_logs() as log:
        for _ in range(2):
            with pytest.raises(UnhealthyError, match="consumer has ended"):
                await engine.embed(EmbedRequest(["a"]))
    assert [entry["event"] for entry in log] == ["consumer_ended"]
    assert engine.failure is not None
    await engine.close()


async def test_failures_of_both_models_of_a_request_are_one_error(caplog) -> None:
    both = embedder, dense = FakeModel(), FakeModel()
    for model in both:
        model.asynchronous = model.held = True
    async with engine_for(embedder, dense=dense) as engine:
        embedder.failures.append(RuntimeError("one"))
        dense.failures.append(RuntimeError("other"))
        request = asyncio.create_task(engine.embed(EmbedRequest(["a"], ALL)))
        for model in both:  # Otherwise the second is cancelled before it is launched.
            await entered(model)
        for model in both:
            let_go(model)
        with pytest.raises(InferenceError):
            await request
        result = await engine.embed(EmbedRequest(["a"]))
    gc.collect()
    assert result.embeddings[0].dense == np.float32([97])
    assert "never retrieved" not in caplog.text


async def test_requests_are_refused_before_startup_and_after_it_has_failed() -> None:
    def broken(_: EngineSettings):
        raise StartupError("no such model in /home/me/models")

    engine = EngineCore(EngineSettings(), loader=broken)
    with pytest.raises(LoadingError):
        await engine.embed(EmbedRequest(["a"]))
    with pytest.raises(StartupError, match="no such model"):
        await engine.start()
    with pytest.raises(UnhealthyError, match="could not be loaded; the log says") as caught:
        await engine.embed(EmbedRequest(["a"]))
    with pytest.raises(UnhealthyError, match="could not be loaded; the log says"):
        engine.loaded()
    assert "no such model" in str(caught.value.__cause__)
    assert "/home/me" not in f"{engine.failure} {caught.value}"
    await engine.close()


async def test_close_cancels_a_running_start() -> None:
    models = loaded(FakeModel())
    entered, gate = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def held(settings: EngineSettings) -> DefaultModels:
        loop.call_soon_threadsafe(entered.set)
        gate.wait()
        return loading(models)(settings)

    engine = EngineCore(settings_of(models), held)
    starting = asyncio.create_task(engine.start())
    await entered.wait()
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0)
    gate.set()
    await closing
    assert starting.cancelled()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("device")]


async def test_the_statuses_of_the_default_models() -> None:
    model, reranker = FakeModel(), FakeReranker()
    model.name, reranker.name = "a/one", "b"
    infos = (ModelInfo("a/one", "bfloat16", {}), ModelInfo("b", "int8", {}))
    models = replace(loaded(model, reranker=reranker), infos=infos)
    names = {"embedding_model": "a/one", "dense_embedding_model": "a/one"}
    engine = EngineCore(settings_of(models, reranker_model="b", **names), loading(models))

    def shown() -> list[tuple[object, ...]]:
        return [
            (
                status.name,
                status.task,
                status.state,
                status.info and status.info.dtype,
                bool(status.makes),
            )
            for status in engine.statuses
        ]

    assert [facts[2:] for facts in shown()] == [(ModelState.LOADING, None, False)] * 2
    async with engine:
        assert shown() == [
            ("a/one", "embed", ModelState.READY, "bfloat16", True),
            ("b", "rerank", ModelState.READY, "int8", True),
        ]
        assert all(status.pinned for status in engine.statuses)
    for name in ("none", "late-interaction"):
        alone = EngineCore(EngineSettings(reranker_model=name, **names), loading(models))
        assert [status.name for status in alone.statuses] == ["a/one"]


@pytest.mark.parametrize("error", [MemoryError, OutOfMemoryError])
async def test_startup_fails_and_leaves_no_thread_if_the_first_forward_fails(error) -> None:
    embedder, reranker = FakeModel(), FakeReranker()
    models = loaded(embedder, reranker=reranker)

    def with_broken_reranker(settings: EngineSettings) -> DefaultModels:
        made = loading(models)(settings)
        first, last = made.models
        copy = replace(last.models[0], measure=lambda _: out_of_memory())
        return replace(made, models=(first, replace(last, models=(copy,))))

    def out_of_memory() -> Iterator[Measured | None]:
        yield None
        raise error("20 GiB are missing")

    engine = EngineCore(settings_of(models), with_broken_reranker)
    with pytest.raises(StartupError, match="does not fit the memory .*: 20 GiB are missing"):
        await engine.start()
    assert [status.state for status in engine.statuses] == [ModelState.FAILED] * 2
    await engine.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("device")]


async def test_abort_does_not_wait_for_tokenizers() -> None:
    """Requests that use a tokenizer thread, wait for one, or come later all fail at once."""
    reads, gate = threading.Event(), threading.Event()

    class Slow(FakeModel):
        def tokenize(self, *arguments, **options):
            reads.set()
            assert gate.wait(60)
            return super().tokenize(*arguments, **options)

    model = Slow()
    engine = engine_for(model, shutdown_timeout=0.05, tokenizer_threads=1)
    await engine.start()
    tasks = [asyncio.create_task(engine.embed(EmbedRequest(["text " * 99]))) for _ in range(5)]
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


@pytest.mark.parametrize("is_stuck", [False, True])
async def test_close_waits_for_a_running_forward_for_at_most_the_shutdown_timeout(is_stuck) -> None:
    model = FakeModel()
    engine = engine_for(model, shutdown_timeout=0.05 if is_stuck else 30)
    await engine.start()
    tasks = [await hold(engine, model), asyncio.create_task(engine.embed(EmbedRequest(["a"])))]
    if not is_stuck:
        for task in tasks:
            task.cancel()
    closing = asyncio.create_task(engine.close())
    for task in tasks:
        with pytest.raises(DrainingError if is_stuck else asyncio.CancelledError):
            await task
    if is_stuck:
        await closing
    assert closing.done() == is_stuck
    let_go(model)
    await closing
    if not is_stuck:
        names = [thread.name for thread in threading.enumerate()]
        assert not [name for name in names if name.startswith("device")]
