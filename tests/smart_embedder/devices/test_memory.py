"""Models of MODELS: loaded by requests, unloaded when memory is short, but never while in use."""

import asyncio
import gc
import threading
import time

import pytest
from structlog.testing import capture_logs

from app.http_metrics import Metrics
from smart_embedder.core import EngineCore
from smart_embedder.errors import (
    DrainingError,
    LoadingError,
    MemoryTakenError,
    ModelNotLoadedError,
    ModelTooLargeError,
    RerankerDisabledError,
    StartupError,
    UnavailableError,
    UnhealthyError,
)
from smart_embedder.interface import MemoryUsage, ModelState
from smart_embedder.requests import EmbedRequest, RerankRequest
from tests.smart_embedder.engines import entered, let_go
from tests.smart_embedder.further_models import (
    GIGABYTE,
    FakeLoader,
    engine_with,
    entries,
    reached,
    status,
    vector,
)
from tests.support.accelerator import broken_memory

A, AB = ord("a"), ord("a") + ord("b")


@pytest.fixture(autouse=True, scope="module")
def short_pauses():
    """Shorten pauses, and exclude the objects of other tests from garbage collection."""
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("smart_embedder.devices.memory.MEMORY_CHECK_INTERVAL", 0.1)
        yield
    gc.unfreeze()


def states(engine: EngineCore, *names: str) -> list[str]:
    return [status(engine, name).state.value for name in names]


async def held_loading(engine: EngineCore, loader: FakeLoader) -> "asyncio.Task[float]":
    """Send a request for a model whose load waits at the loader's gate."""
    loader.held = True
    waits = asyncio.create_task(vector(engine, "a", "one"))
    await asyncio.to_thread(loader.entered.acquire)
    return waits


async def busy(engine: EngineCore, loader: FakeLoader, name: str) -> "asyncio.Task[float]":
    """Load a model, and send a text to it whose forward is held."""
    await engine.load(name)
    loader.alive[name].held = True
    running = asyncio.create_task(vector(engine, "a", name))
    await entered(loader.alive[name])
    return running


async def test_a_model_is_loaded_at_startup_or_once_by_its_first_requests() -> None:
    loader = FakeLoader()
    broken, early = entries("broken", "early", load="start")
    loader.failures.append(StartupError("the model folder one does not exist"))
    async with engine_with(loader, broken, early, *entries("one", "two")) as engine:
        assert states(engine, "broken", "early", "one") == ["failed", "ready", "unloaded"]
        assert await vector(engine, "ab", "early") == AB + 1
        assert await vector(engine, "ab") == AB
        found = await asyncio.gather(*(vector(engine, "ab", "one") for _ in range(3)))
        assert found == [AB + 1] * 3
        assert loader.loads == ["broken", "early", "one"]
        assert states(engine, "one", "two") == ["ready", "unloaded"]


async def test_a_reranker_of_models_scores_without_a_default_reranker() -> None:
    async with engine_with(FakeLoader(), *entries("judge", task="rerank")) as engine:
        request = RerankRequest("q", ["ab", "abc"], model="judge")
        assert (await engine.rerank(request)).scores == [3, 4]
        with pytest.raises(RerankerDisabledError):
            await engine.rerank(RerankRequest("q", ["ab"]))


async def test_the_least_recently_used_model_is_unloaded_and_its_memory_released() -> None:
    loader, metrics = FakeLoader(gigabytes=2), Metrics()
    names = ("one", "two", "three")
    async with engine_with(loader, *entries(*names), metrics=metrics) as engine:
        for name in ("one", "two", "one"):
            await vector(engine, "a", name)
        assert await vector(engine, "a", "three") == A + 1
        assert states(engine, *names) == ["ready", "unloaded", "ready"]
        assert set(loader.alive) == {"one", "three"}
        assert await vector(engine, "a", "two") == A + 1
        assert loader.loads == ["one", "two", "three", "two"]
        assert metrics.value("embedder_model_unloads_total", model="two") == 1
        assert metrics.value("embedder_model_loads_total", model="two", result="success") == 2


@pytest.mark.parametrize(
    ("gigabytes", "others", "error", "message", "pause"),
    [
        (9, 0, ModelNotLoadedError, "the model one could not be loaded; the log says why", 30),
        (0.5, 0, ModelTooLargeError, "at most 500 MB can be freed below MODEL_MEMORY_TH", None),
        (2, 1.9, MemoryTakenError, "other programs use 1.7 GB", 10),
    ],
)
async def test_a_failed_load_is_reported_with_its_reason_and_retried_by_command(
    gigabytes, others, error, message, pause
) -> None:
    loader, metrics = FakeLoader(gigabytes), Metrics()
    loader.used_by_others = int(others * GIGABYTE)
    is_broken = error is ModelNotLoadedError
    if is_broken:
        loader.failures.append(StartupError("the model folder /secret/one does not exist"))
    async with engine_with(loader, *entries("one"), metrics=metrics) as engine:
        for _ in range(2):
            with pytest.raises(error, match=message) as refused:
                await vector(engine, "a", "one")
            assert str(refused.value) == status(engine, "one").reason
            waits = refused.value.retry_after
            assert waits is None if pause is None else 0 < waits <= pause
        assert loader.loads == ["one"] * is_broken
        assert states(engine, "one") == ["loading" if error is MemoryTakenError else "failed"]
        with pytest.raises(error):
            engine.loaded("one")
        failures = metrics.value("embedder_model_loads_total", model="one", result="failure")
        assert failures == (error is not MemoryTakenError)
        assert await vector(engine, "ab") == AB
        loader.total, loader.used_by_others = 9 * GIGABYTE, 0
        with pytest.raises(error):
            await vector(engine, "a", "one")
        await engine.load("one")
        assert await vector(engine, "a", "one") == A + 1
        assert status(engine, "one").reason is None


async def test_a_model_that_is_reloaded_from_other_files_logs_a_warning() -> None:
    loader, metrics = FakeLoader(gigabytes=1), Metrics()
    replaced = "embedder_model_replacements_total"
    with capture_logs() as log:
        async with engine_with(loader, *entries("one", "two"), metrics=metrics) as engine:
            for name in ("one", "two", "one"):
                await vector(engine, "a", name)
            assert metrics.value(replaced, model="one") == 0
            loader.versions["one"] = "second"
            for name in ("two", "one"):
                await vector(engine, "a", name)
            assert [status(engine, name).files_replaced for name in ("one", "two")] == [1, 0]
    assert metrics.value(replaced, model="one") == 1
    (warning,) = [entry for entry in log if entry["event"] == "model_files_replaced"]
    assert (warning["model"], warning["log_level"]) == ("one", "warning")


async def test_a_load_continues_when_its_requests_time_out_or_leave() -> None:
    loader = FakeLoader()
    async with engine_with(loader, *entries("one")) as engine:
        leaves = await held_loading(engine, loader)
        with pytest.raises(LoadingError, match="^the model one is still being loaded$") as refused:
            async with engine.lease("one", seconds=0):
                pass
        assert refused.value.retry_after >= 1
        # The default model serves in the meantime.
        assert await vector(engine, "ab") == AB
        assert (states(engine, "one"), status(engine, "one").requests) == (["loading"], 1)
        leaves.cancel()
        await asyncio.wait({leaves})
        assert status(engine, "one").requests == 0
        loader.gate.release()
        await reached(engine, "one", ModelState.READY)
        assert await vector(engine, "ab", "one") == AB + 1
    assert loader.loads == ["one"]


async def lease_until_refused(engine: EngineCore) -> None:
    while True:
        async with engine.lease("one", seconds=0):
            await asyncio.sleep(0)


async def test_a_used_model_is_closed_after_its_minimum_time_and_finishes_its_requests(
    monkeypatch,
) -> None:
    async with engine_with(FakeLoader(gigabytes=1), *entries("one", "two")) as engine:
        async with engine.lease("one") as leased:
            with pytest.raises(LoadingError):
                await engine.lease("two", seconds=0.2).__aenter__()
            async with engine.lease("one", seconds=0):
                pass  # It serves for at least two seconds.
            monkeypatch.setattr("smart_embedder.devices.memory._MIN_SERVICE_SECONDS", 0.0)
            with pytest.raises(LoadingError):
                await lease_until_refused(engine)
            result = await engine.embedding.embed(leased, EmbedRequest(["a"]))
            assert result.embeddings[0].dense[0] == A + 1
            del leased, result
        assert await vector(engine, "a", "two") == A + 1
        assert await vector(engine, "a", "one") == A + 1


async def test_a_model_is_kept_for_a_request_that_was_told_to_retry() -> None:
    loader = FakeLoader(gigabytes=1)
    loader.held = True
    async with engine_with(loader, *entries("one", "two")) as engine:
        with pytest.raises(LoadingError):
            await engine.lease("one", seconds=0).__aenter__()
        loader.held = False
        loader.gate.release()
        await reached(engine, "one", ModelState.READY)
        other = asyncio.create_task(vector(engine, "a", "two"))
        await reached(engine, "two", ModelState.LOADING)
        await asyncio.sleep(0.2)
        assert await vector(engine, "a", "one") == A + 1
        assert await other == A + 1
        assert loader.loads == ["one", "two"]


async def test_only_unused_models_are_unloaded_and_no_more_than_needed() -> None:
    loader = FakeLoader(gigabytes=5)
    loader.gigabytes["large"] = 3
    names = ("pinned", "leased", "first", "second", "third")
    models = [*entries("pinned", pinned=True), *entries(*names[1:], "large")]
    async with engine_with(loader, *models) as engine:
        for name in names:
            await vector(engine, "a", name)
        async with engine.lease("leased"):
            # Memory cached by the allocator is released before a model is unloaded.
            loader.total, loader.garbage = 9 * GIGABYTE, GIGABYTE
            await vector(engine, "a", "large")
            assert states(engine, *names) == ["ready"] * 5
            await engine.unload("large")
            loader.total = 6 * GIGABYTE
            await vector(engine, "a", "large")
        assert states(engine, *names) == ["ready", "ready", "unloaded", "unloaded", "ready"]
        loader.gigabytes["first"] = 6
        with pytest.raises(ModelTooLargeError, match="at most 5.0 GB can be freed"):
            await vector(engine, "a", "first")
        assert states(engine, *names) == ["ready", "ready", "failed", "unloaded", "ready"]


async def test_a_failed_load_is_retried_by_a_request_after_30_seconds(monkeypatch) -> None:
    loader = FakeLoader()
    loader.failures += [StartupError("a file is missing")] * 2
    async with engine_with(loader, *entries("one")) as engine:
        with pytest.raises(ModelNotLoadedError):
            await vector(engine, "a", "one")
        with pytest.raises(ModelNotLoadedError):
            await vector(engine, "a", "one")
        assert loader.loads == ["one"], "not by every request"
        now = time.perf_counter
        monkeypatch.setattr(time, "perf_counter", lambda: now() + 31)
        with pytest.raises(ModelNotLoadedError):
            await vector(engine, "a", "one")
        monkeypatch.setattr(time, "perf_counter", lambda: now() + 62)
        assert await vector(engine, "a", "one") == A + 1
        assert loader.loads == ["one"] * 3


async def test_idle_models_are_unloaded_in_the_background_above_the_memory_threshold() -> None:
    loader = FakeLoader(gigabytes=3)
    async with engine_with(loader, *entries("one", "two")) as engine:
        await vector(engine, "a", "one")
        await vector(engine, "a", "two")
        loader.garbage = loader.used_by_others = GIGABYTE
        while loader.garbage:  # noqa: ASYNC110 - until the memory is checked
            await asyncio.sleep(0.01)
        assert states(engine, "one", "two") == ["ready", "ready"]
        loader.used_by_others = int(1.5 * GIGABYTE)
        await reached(engine, "one", ModelState.UNLOADED)
        async with engine.lease("two"):
            loader.used_by_others = loader.total
            await asyncio.sleep(0.3)
            assert states(engine, "two") == ["ready"], "it is used"
        await reached(engine, "two", ModelState.UNLOADED)


async def test_a_model_that_is_leased_while_the_memory_is_read_is_not_unloaded() -> None:
    loader, reads = FakeLoader(gigabytes=3), 0
    read, reading, go_on = loader.read_memory, threading.Event(), threading.Event()

    def second_read_waits(name: str) -> MemoryUsage:
        nonlocal reads
        reads += 1
        if reads == 2:  # After the first, unreferenced memory is released.
            reading.set()
            go_on.wait(60)
        return read(name)

    async with engine_with(loader, *entries("one")) as engine:
        await vector(engine, "a", "one")
        loader.used_by_others = loader.total
        loader.read_memory = second_read_waits
        await asyncio.to_thread(reading.wait, 60)
        async with engine.lease("one"):
            go_on.set()
            async with engine._models._load_lock:  # Wait until the check of the memory has ended.
                assert states(engine, "one") == ["ready"]


@pytest.mark.parametrize("seconds", [30, 0.01])
async def test_close_waits_for_a_load_for_at_most_the_shutdown_timeout(seconds) -> None:
    loader, before = FakeLoader(), {*threading.enumerate()}
    async with engine_with(loader, *entries("one"), shutdown_timeout=seconds) as engine:
        accepted = await held_loading(engine, loader)
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        if seconds == 30:
            loader.gate.release()
            assert await accepted == A + 1
        else:
            with pytest.raises(DrainingError):
                await accepted
        await closing
        loader.gate.release()
    for thread in {*threading.enumerate()} - before:
        if thread.name == "model-loader":
            await asyncio.to_thread(thread.join, 60)
            assert not thread.is_alive()


async def test_a_failed_device_takes_only_its_own_models_out_of_service() -> None:
    loader = FakeLoader()
    loader.devices["one"] = "other"
    async with engine_with(loader, *entries("one")) as engine:
        assert await vector(engine, "ab", "one") == AB + 1
        loader.alive["one"].failures.append(broken_memory())
        with pytest.raises(UnhealthyError):
            await vector(engine, "a", "one")
        with pytest.raises(UnhealthyError, match="the device of this model has failed"):
            await vector(engine, "a", "one")
        assert engine.failed_devices == ["other"]
        assert engine.failure is None
        assert await vector(engine, "ab") == AB


async def test_a_model_is_unloaded_by_command_after_the_requests_that_use_it() -> None:
    loader = FakeLoader()
    (pinned,) = entries("one", pinned=True)
    async with engine_with(loader, pinned) as engine:
        running = await busy(engine, loader, "one")
        unloading = asyncio.create_task(engine.unload("one"))
        await asyncio.sleep(0)
        later = asyncio.create_task(vector(engine, "ab", "one"))
        let_go(loader.alive["one"])
        assert await running == A + 1
        await unloading
        assert await later == AB + 1
        assert loader.loads == ["one", "one"]
        loader.garbage = GIGABYTE
        for _ in range(2):
            await engine.unload("one")
        assert loader.garbage == 0, "memory has been released"
        assert states(engine, "one") == ["unloaded"]
        assert not loader.alive


@pytest.mark.parametrize("stopped", [False, True])
async def test_an_unload_that_waits_too_long_or_is_aborted_fails(stopped) -> None:
    loader = FakeLoader()
    async with engine_with(loader, *entries("one"), request_timeout=0.2) as engine:
        running = await busy(engine, loader, "one")
        unloading = asyncio.create_task(engine.unload("one"))
        await asyncio.sleep(0)
        if stopped:
            engine.abort()
        message = "was stopped" if stopped else "still in use"
        with pytest.raises(DrainingError if stopped else UnavailableError, match=message):
            await unloading
        let_go(loader.alive["one"])
        if stopped:
            with pytest.raises(DrainingError):
                await running
        else:
            assert await running == A + 1
            assert await vector(engine, "ab", "one") == AB + 1, "the model stays loaded"
            assert loader.loads == ["one"]
