"""The engine without HTTP: failing forwards, faults, stuck devices and short memory."""

import asyncio
import gc
import threading
from dataclasses import replace

import numpy as np
import pytest

from smart_embedder.engine import Engine
from smart_embedder.engine.records import EmbedRequest, TokenizedText
from smart_embedder.errors import (
    InferenceError,
    InferenceTimeoutError,
    OutOfMemoryError,
    StartupError,
    UnhealthyError,
)
from smart_embedder.observability.metrics import Metrics
from smart_embedder.settings import Settings
from tests.engine.engines import engine_for, hold, let_go, queued, waiting
from tests.engine.fakes import FakeModel, loaded


async def test_a_failed_forward_fails_its_own_requests_and_no_later_one() -> None:
    model = FakeModel()
    async with engine_for(model) as engine:
        model.failures.append(RuntimeError("cublas is unwell"))
        with pytest.raises(InferenceError) as failed:
            await engine.embed(EmbedRequest(["a"]))
        assert isinstance(failed.value.__cause__, RuntimeError)
        result = await engine.embed(EmbedRequest(["a"]))
    assert result.embeddings[0].dense == np.float32([97])


async def test_a_request_whose_first_part_failed_is_not_run_further() -> None:
    model, metrics = FakeModel(), Metrics()
    async with engine_for(model, metrics) as engine:
        model.failures.append(RuntimeError("broken"))
        with pytest.raises(InferenceError):
            await engine.embed(EmbedRequest(["aaaa"] * 9))
        await engine.embed(EmbedRequest(["b"]))
        assert metrics.value("embedding_queue_size") == 0
    assert model.batches == [[4, 4], [1]]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("CUDA out of memory"),
        RuntimeError("X_ALLOC_FAILED"),
        RuntimeError("NVML_SUCCESS == r INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp"),
    ],
)
async def test_a_single_text_that_does_not_fit_is_told_as_such(error) -> None:
    model, metrics = FakeModel(), Metrics()
    async with engine_for(model, metrics) as engine:
        model.failures.append(error)
        with pytest.raises(OutOfMemoryError) as refused:
            await engine.embed(EmbedRequest(["a"]))
        await engine.embed(EmbedRequest(["a"]))
    assert refused.value.retry_after
    assert metrics.value("embedder_out_of_memory_splits_total") == 0


async def test_a_batch_that_does_not_fit_is_halved_with_the_memory_freed_in_between() -> None:
    model, metrics = FakeModel(), Metrics()
    freed: list[int] = []
    models = replace(loaded(model), free_memory=lambda: freed.append(len(model.batches)))
    async with Engine(Settings(), lambda _: models, metrics) as engine:
        model.failures += [MemoryError(), MemoryError()]
        result = await engine.embed(EmbedRequest(["aa", "bb", "cc", "dd", "ee"]))
    assert model.batches == [[2] * 5, [2, 2], [2], [2], [2, 2, 2]]
    assert freed == [1, 2]
    assert metrics.value("embedder_out_of_memory_splits_total") == 2
    assert [int(e.dense[0]) for e in result.embeddings] == [194, 196, 198, 200, 202]


async def test_after_a_split_forwards_are_smaller_for_a_while() -> None:
    model = FakeModel()
    async with engine_for(model) as engine:
        model.failures.append(MemoryError())
        await engine.embed(EmbedRequest(["aa"] * 5))
        model.batches.clear()
        await engine.embed(EmbedRequest(["aa"] * 5))
    assert max(map(len, model.batches)) < 5


async def test_only_the_request_with_the_text_that_does_not_fit_fails() -> None:
    model, metrics = FakeModel(), Metrics()
    async with engine_for(model, metrics) as engine:
        held = await hold(engine, model)
        one = asyncio.create_task(engine.embed(EmbedRequest(["aa"])))
        await queued(engine, tokens=2)
        two = asyncio.create_task(engine.embed(EmbedRequest(["bb", "cc"])))
        await queued(engine, tokens=6)
        model.failures += [MemoryError(), MemoryError()]
        model.failures.insert(0, None)
        let_go(model)
        await held
        with pytest.raises(OutOfMemoryError):
            await one
        assert [int(e.dense[0]) for e in (await two).embeddings] == [196, 198]


async def test_a_forward_that_takes_too_long_fails_its_callers_but_not_those_who_wait() -> None:
    model, metrics = FakeModel(), Metrics()
    async with engine_for(model, metrics, gpu_process_timeout=0.05) as engine:
        held = await hold(engine, model)
        waits = asyncio.create_task(engine.embed(EmbedRequest(["waits"])))
        with pytest.raises(InferenceTimeoutError, match="forward took longer than 0.05 seconds"):
            await held
        assert not waits.done()
        let_go(model)
        await waits


async def test_a_device_that_does_not_come_back_is_a_failure_until_it_does() -> None:
    model = FakeModel()
    async with engine_for(model, gpu_process_timeout=0.02) as engine:
        held = await hold(engine, model)
        with pytest.raises(InferenceTimeoutError):
            await held
        while engine.failure is None:  # noqa: ASYNC110 - the clock must reach twice the limit
            await asyncio.sleep(0.005)
        with pytest.raises(UnhealthyError, match="has not come back"):
            await engine.embed(EmbedRequest(["a"]))
        let_go(model)
        while engine.failure is not None:  # noqa: ASYNC110 - until the thread is back
            await asyncio.sleep(0)
        await engine.embed(EmbedRequest(["a"]))


async def test_a_fault_in_the_consumer_itself_is_a_failure_and_not_a_silence(monkeypatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    engine = engine_for(FakeModel())
    await engine.start()
    monkeypatch.setattr("smart_embedder.engine.scheduling.queue.form_batch", broken)
    # Who waits for it is told, and so is whoever comes later.
    for _ in range(2):
        with pytest.raises(UnhealthyError, match="consumer has ended"):
            await engine.embed(EmbedRequest(["a"]))
    assert engine.failure is not None
    await engine.close()


async def test_a_fault_behind_a_forward_is_told_to_those_in_it_and_to_those_who_wait(
    monkeypatch,
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    model, metrics = FakeModel(), Metrics()
    engine = engine_for(model, metrics)
    await engine.start()
    tasks = [
        await hold(engine, model),
        asyncio.create_task(engine.embed(EmbedRequest(["waits"] * 9))),
    ]
    await waiting(metrics, 1)
    monkeypatch.setattr("smart_embedder.engine.scheduling.batcher.Batch.complete", broken)
    let_go(model)
    for task in tasks:
        with pytest.raises(UnhealthyError, match="consumer has ended"):
            await task
    await engine.close()


async def test_a_failure_of_both_models_is_one_error_and_nothing_is_left_behind(caplog) -> None:
    both = embedder, dense = FakeModel(), FakeModel()
    for model in both:
        model.asynchronous = model.held = True
    models = replace(loaded(embedder), dense=dense)
    async with Engine(Settings(), loader=lambda _: models) as engine:
        embedder.failures.append(RuntimeError("one"))
        dense.failures.append(RuntimeError("other"))
        request = asyncio.create_task(engine.embed(EmbedRequest(["a"])))
        for model in both:  # Else the second is not launched, as nobody waits for it.
            await asyncio.to_thread(model.entered.acquire)
        for model in both:
            model.held = False
            model.gate.release()
        with pytest.raises(InferenceError):
            await request
        result = await engine.embed(EmbedRequest(["a"]))
    gc.collect()
    assert result.embeddings[0].dense == np.float32([97])
    assert "never retrieved" not in caplog.text


async def test_a_failed_start_is_remembered() -> None:
    def broken(_: Settings):
        raise StartupError("no such model in /home/me/models")

    engine = Engine(Settings(), loader=broken)
    with pytest.raises(StartupError, match="no such model"):
        await engine.start()
    with pytest.raises(UnhealthyError, match="could not be loaded; the log says") as caught:
        await engine.embed(EmbedRequest(["a"]))
    assert "no such model" in str(caught.value.__cause__)
    assert "/home/me" not in f"{engine.failure} {caught.value}"
    await engine.close()


async def test_a_request_of_several_batches_is_told_at_the_limit() -> None:
    model = FakeModel()
    async with engine_for(model, gpu_process_timeout=0.05, shutdown_timeout=0.2) as engine:
        model.held = True
        with pytest.raises(InferenceTimeoutError):
            await engine.embed(EmbedRequest(["aaaa"] * 9))
        let_go(model)
    assert model.batches == [[4, 4]]


async def test_who_waits_for_a_stuck_device_is_told_once_it_counts_as_stuck() -> None:
    model = FakeModel()
    async with engine_for(model, gpu_process_timeout=0.05) as engine:
        held = await hold(engine, model)
        with pytest.raises(UnhealthyError, match="does not come back"):
            await engine.embed(EmbedRequest(["waits"]))
        with pytest.raises(InferenceTimeoutError):
            await held
        let_go(model)


async def test_who_comes_to_the_queue_of_a_stuck_device_is_told_at_once() -> None:
    """A request that was accepted before, and had to be tokenised."""
    model, goes_on = FakeModel(), threading.Event()
    tokenize = model.tokenize

    def tokenize_late(*args: object) -> list[TokenizedText]:
        goes_on.wait()
        return tokenize(*args)

    async with engine_for(model, gpu_process_timeout=0.02) as engine:
        held = await hold(engine, model)
        model.tokenize = tokenize_late
        late = asyncio.create_task(engine.embed(EmbedRequest(["late"])))
        with pytest.raises(InferenceTimeoutError):
            await held
        while engine.failure is None:  # noqa: ASYNC110 - the clock must reach twice the limit
            await asyncio.sleep(0.005)
        goes_on.set()
        with pytest.raises(UnhealthyError, match="does not come back"):
            await late
        let_go(model)
