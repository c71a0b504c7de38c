"""Models of MODELS: loaded when they are named, unloaded when memory is short, never in work."""

import asyncio
import gc
import threading

import pytest
from structlog.testing import capture_logs

from smart_embedder.engine import Engine
from smart_embedder.engine.pooled_model import ModelState
from smart_embedder.engine.records import EmbedRequest, RerankRequest
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
from smart_embedder.observability.metrics import Metrics
from tests.engine.devices.test_pool import broken_memory
from tests.engine.engines import entered, hold, let_go, queued
from tests.engine.fakes import FakeModel
from tests.engine.further_models import (
    GIGABYTE,
    FakeLoader,
    engine_with,
    entries,
    reached,
    status,
    vector,
)

A, AB = ord("a"), ord("a") + ord("b")


@pytest.fixture(autouse=True, scope="module")
def short_pauses():
    """What other tests have left is not looked at in each collection, and pauses are short."""
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("smart_embedder.engine.model_pool.PAUSE", 0.01)
        yield
    gc.unfreeze()


async def loading(loader: FakeLoader) -> None:
    """Wait until the loader's thread is inside a loading."""
    await asyncio.to_thread(loader.entered.acquire)


async def busy(engine: Engine, loader: FakeLoader, name: str) -> "asyncio.Task[float]":
    """Load a model by command, and let it compute a text until the test lets it go on."""
    await engine.load(name)
    loader.alive[name].held = True
    running = asyncio.create_task(vector(engine, "a", name))
    await entered(loader.alive[name])
    return running


async def test_a_model_is_loaded_by_its_first_request_alone() -> None:
    loader = FakeLoader()
    async with engine_with(loader, *entries("one", "two")) as engine:
        assert loader.loads == []
        assert await vector(engine, "ab") == AB
        found = await asyncio.gather(*(vector(engine, "ab", "one") for _ in range(3)))
        assert found == [AB + 1] * 3
        assert loader.loads == ["one"]
        assert [each.state.value for each in engine.statuses][-2:] == ["ready", "unloaded"]


async def test_a_model_of_the_start_is_there_before_the_first_request() -> None:
    loader = FakeLoader()
    first, second = entries("one", "two", load="start")
    loader.failures.append(StartupError("the model folder one does not exist"))
    async with engine_with(loader, first, second) as engine:
        assert loader.loads == ["one", "two"]
        states = [each.state for each in engine.statuses]
        assert states[-2:] == [ModelState.FAILED, ModelState.READY]
        assert await vector(engine, "ab", "two") == AB + 1


async def batches_of(engine: Engine, held: FakeModel, loader: FakeLoader, *names: str | None):
    """The batches of twelve texts of five tokens for each of these models, from full queues."""
    for name in names:
        if name is not None:
            await engine.embed(EmbedRequest(["first"], model=name))
    model_of = {name: held if name is None else loader.alive[name] for name in names}
    for model in model_of.values():
        model.batches.clear()
    first = await hold(engine, held)
    requests = [
        asyncio.create_task(engine.embed(EmbedRequest(["abcde"] * 12, model=name)))
        for name in names
    ]
    await queued(engine, 60 * len(names))
    let_go(held)
    await asyncio.gather(first, *requests)
    held.batches.remove([len("held")])
    return [[sum(batch) for batch in model.batches] for model in model_of.values()]


async def test_each_models_batches_are_as_large_as_its_own_token_budget() -> None:
    loader, model = FakeLoader(), FakeModel()
    loader.token_budgets = {"small": 60, "large": 10}
    async with engine_with(loader, *entries("small", "large"), model=model) as engine:
        found = await batches_of(engine, model, loader, None, "small", "large")
        assert found == [[60], [60], [10] * 6]
        budgets = [each.token_budgets for each in engine.statuses[-2:]]
        # What a request for the model is told, too, where a stream asks for the size of a piece.
        assert engine.loaded("large").max_batch_tokens == 10
    assert budgets == [{"cpu": 60}, {"cpu": 10}]


async def test_too_little_memory_for_one_model_leaves_the_budgets_of_the_others() -> None:
    loader, model = FakeLoader(), FakeModel()
    loader.token_budgets = {"one": 60, "two": 60}
    async with engine_with(loader, *entries("one", "two"), model=model) as engine:
        await engine.embed(EmbedRequest(["loaded"], model="one"))
        loader.alive["one"].failures.append(MemoryError())
        result = await engine.embed(EmbedRequest(["abcde"] * 8, model="one"))
        assert len(result.embeddings) == 8
        found = await batches_of(engine, model, loader, None, "two")
        assert found == [[60], [60]]
        assert engine.statuses[-2].token_budgets["cpu"] < 30
        assert engine.statuses[-1].token_budgets == {"cpu": 60}


async def test_a_reranker_stands_beside_the_default_one() -> None:
    loader = FakeLoader()
    async with engine_with(loader, *entries("judge", task="rerank")) as engine:
        request = RerankRequest("q", ["ab", "abc"], model="judge")
        assert (await engine.rerank(request)).scores == [102, 103]
        with pytest.raises(RerankerDisabledError):
            await engine.rerank(RerankRequest("q", ["ab"]))


async def test_the_least_recently_used_one_makes_room_and_leaves_nothing_behind() -> None:
    loader, metrics = FakeLoader(gigabytes=2), Metrics()
    names = ("one", "two", "three")
    async with engine_with(loader, *entries(*names), metrics=metrics) as engine:
        for name in ("one", "two", "one"):
            await vector(engine, "a", name)
        assert await vector(engine, "a", "three") == A + 1
        assert [status(engine, name).state.value for name in names] == [
            "ready",
            "unloaded",
            "ready",
        ]
        assert set(loader.alive) == {"one", "three"}
        assert await vector(engine, "a", "two") == A + 1
        assert loader.loads == ["one", "two", "three", "two"]
        assert metrics.value("embedder_model_unloads_total", model="two") == 1
        assert metrics.value("embedder_model_loads_total", model="two", result="success") == 2
        assert metrics.value("embedder_model_state", model="one", state="unloaded") == 1


async def test_a_pinned_one_stays_and_what_does_not_fit_beside_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loader = FakeLoader(gigabytes=1.5)
    (pinned,) = entries("pinned", pinned=True)
    async with engine_with(loader, pinned, *entries("other")) as engine:
        await vector(engine, "a", "pinned")
        with pytest.raises(ModelTooLargeError) as refused:
            await vector(engine, "a", "other")
        assert refused.value.retry_after is None
        assert str(refused.value) == (
            "the model other needs 1.0 GB of the memory of memory, and at most 500 MB can be had "
            "below MODEL_MEMORY_THRESHOLD=1, where pinned models and the default ones stay"
        )
        assert await vector(engine, "a", "pinned") == A + 1
        assert status(engine, "other").reason == str(refused.value)
        loader.total = 2 * GIGABYTE
        monkeypatch.setattr("smart_embedder.engine.pooled_model._PAUSE_AFTER_FAILURE", 0)
        assert await vector(engine, "a", "other") == A + 1
    assert loader.loads == ["pinned", "other"]


async def test_the_memory_of_other_programs_is_waited_for(monkeypatch) -> None:
    loader = FakeLoader(gigabytes=10)
    loader.gigabytes["large"] = 8
    loader.used_by_others = 9 * GIGABYTE
    with capture_logs() as log:
        async with engine_with(loader, *entries("large")) as engine:
            for _ in range(2):
                with pytest.raises(MemoryTakenError, match="other programs hold 8.0 GB") as refused:
                    await vector(engine, "a", "large")
                assert 1 <= refused.value.retry_after <= 10
            assert status(engine, "large").state is ModelState.LOADING
            assert status(engine, "large").reason == str(refused.value)
            loader.used_by_others = 0
            monkeypatch.setattr("smart_embedder.engine.pooled_model._PAUSE_FOR_MEMORY", 0)
            assert await vector(engine, "a", "large") == A + 1
            assert status(engine, "large").reason is None
    assert [each["event"] for each in log] == ["model_waits_for_memory", "model_loaded"]


async def test_a_model_that_comes_back_from_other_files_says_so() -> None:
    loader, metrics = FakeLoader(gigabytes=1), Metrics()
    replaced = "embedder_model_replacements_total"
    with capture_logs() as log:
        async with engine_with(loader, *entries("one", "two"), metrics=metrics) as engine:
            for name in ("one", "two", "one"):
                await vector(engine, "a", name)
            assert metrics.value(replaced, model="one") == 0
            loader.versions["one"] = "second"
            for name in ("two", "one", "two", "one"):
                await vector(engine, "a", name)
            assert status(engine, "one").files_replaced == 1
            assert status(engine, "two").files_replaced == 0
    assert metrics.value(replaced, model="one") == 1
    (warning,) = [each for each in log if each["event"] == "model_files_replaced"]
    assert (warning["model"], warning["log_level"]) == ("one", "warning")


async def test_a_batch_whose_caller_has_left_is_work_in_hand_too() -> None:
    loader = FakeLoader(gigabytes=1)
    async with engine_with(loader, *entries("one", "two")) as engine:
        await vector(engine, "a", "one")
        model = loader.alive["one"]
        model.held = True
        leaves = asyncio.create_task(vector(engine, "a", "one"))
        await entered(model)
        await entered(model)
        leaves.cancel()
        await asyncio.wait({leaves})
        del leaves  # Its traceback holds the model.
        with pytest.raises(LoadingError, match="still being loaded"):
            async with engine.lease("two", seconds=0):
                pass
        assert status(engine, "one").state is ModelState.READY
        let_go(model)
        del model
        assert await vector(engine, "a", "two") == A + 1


async def test_a_request_that_cannot_wait_for_the_loading_is_told_when_to_come_back() -> None:
    loader = FakeLoader()
    loader.held = True
    async with engine_with(loader, *entries("one")) as engine:
        with pytest.raises(LoadingError) as refused:
            async with engine.lease("one", seconds=0):
                pass
        assert str(refused.value) == "the model one is still being loaded"
        assert refused.value.retry_after >= 1
        await loading(loader)
        # The default model answers meanwhile.
        assert await vector(engine, "ab") == AB
        assert status(engine, "one").state is ModelState.LOADING
        loader.gate.release()
        assert await vector(engine, "ab", "one") == AB + 1
    assert loader.loads == ["one"]


async def lease_until_refused(engine: Engine, name: str) -> None:
    while True:
        async with engine.lease(name, seconds=0):
            await asyncio.sleep(0)


async def test_what_a_request_has_in_hand_is_done_before_its_model_gives_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("smart_embedder.engine.pooled_model._LEAST_TURN", 0.0)
    loader = FakeLoader(gigabytes=1)
    async with engine_with(loader, *entries("one", "two")) as engine:
        async with engine.lease("one") as leased:
            other = asyncio.create_task(vector(engine, "a", "two"))
            with pytest.raises(LoadingError):
                await lease_until_refused(engine, "one")
            made = await engine.embedding.embed(leased, EmbedRequest(["a"]))
            assert made.embeddings[0].dense[0] == A + 1
            del leased, made
        assert await other == A + 1
        # Whoever was told to come back finds it there.
        assert await vector(engine, "a", "one") == A + 1


async def test_a_client_that_leaves_while_its_model_is_loaded_leaves_nothing_behind() -> None:
    loader = FakeLoader()
    loader.held = True
    async with engine_with(loader, *entries("one")) as engine:
        leaves = asyncio.create_task(vector(engine, "a", "one"))
        await loading(loader)
        assert status(engine, "one").requests == 1
        leaves.cancel()
        await asyncio.wait({leaves})
        assert status(engine, "one").requests == 0
        loader.gate.release()
        await reached(engine, "one", ModelState.READY)
        assert await vector(engine, "a", "one") == A + 1
    assert loader.loads == ["one"]


async def test_a_loading_that_fails_is_one_sentence_and_is_tried_again_after_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loader, metrics = FakeLoader(), Metrics()
    loader.failures.append(StartupError("the model folder /secret/one does not exist"))
    async with engine_with(loader, *entries("one"), metrics=metrics) as engine:
        for _ in range(2):
            with pytest.raises(ModelNotLoadedError) as refused:
                await vector(engine, "a", "one")
            told = "the model one could not be loaded; the log says why"
            assert str(refused.value) == status(engine, "one").reason == told
            assert 0 < refused.value.retry_after <= 30
        assert loader.loads == ["one"]
        assert await vector(engine, "ab") == AB
        assert metrics.value("embedder_model_loads_total", model="one", result="failure") == 1
        monkeypatch.setattr("smart_embedder.engine.pooled_model._PAUSE_AFTER_FAILURE", 0)
        assert status(engine, "one").reason == told
        assert await vector(engine, "a", "one") == A + 1
        assert status(engine, "one").reason is None


async def test_memory_that_is_short_after_work_is_got_from_idle_models() -> None:
    loader = FakeLoader(gigabytes=3)
    async with engine_with(loader, *entries("one", "two")) as engine:
        await vector(engine, "a", "one")
        await vector(engine, "a", "two")
        loader.used_by_others = int(1.5 * GIGABYTE)
        while status(engine, "one").state is not ModelState.UNLOADED:
            await vector(engine, "ab")
        await reached(engine, "one", ModelState.UNLOADED)
        assert status(engine, "two").state is ModelState.READY
        assert await vector(engine, "a", "two") == A + 1


async def test_closing_waits_for_a_request_whose_model_is_being_loaded() -> None:
    loader = FakeLoader()
    loader.held = True
    async with engine_with(loader, *entries("one")) as engine:
        accepted = asyncio.create_task(vector(engine, "a", "one"))
        await loading(loader)
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        loader.gate.release()
        assert await accepted == A + 1
        await closing


async def test_a_drain_that_takes_too_long_fails_the_requests_that_wait_for_a_model() -> None:
    loader = FakeLoader()
    loader.held = True
    async with engine_with(loader, *entries("one"), shutdown_timeout=0.01) as engine:
        accepted = asyncio.create_task(vector(engine, "a", "one"))
        await loading(loader)
        await engine.close()
        with pytest.raises(DrainingError):
            await accepted
        loader.gate.release()


async def test_a_device_of_its_own_computes_its_model_and_no_other() -> None:
    loader, default = FakeLoader(), FakeModel()
    loader.devices["one"] = "other"
    async with engine_with(loader, *entries("one"), model=default) as engine:
        assert await vector(engine, "ab", "one") == AB + 1
        held = await hold(engine, default)
        assert await vector(engine, "ab", "one") == AB + 1
        waits = asyncio.create_task(vector(engine, "ab"))
        await queued(engine, tokens=2)
        let_go(default)
        assert await waits == AB
        await held


async def test_a_device_of_its_own_that_fails_takes_its_model_alone_out_of_service() -> None:
    loader = FakeLoader()
    loader.devices["one"] = "other"
    async with engine_with(loader, *entries("one")) as engine:
        await vector(engine, "a", "one")
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
        assert status(engine, "one").state is ModelState.READY
        unloading = asyncio.create_task(engine.unload("one"))
        await asyncio.sleep(0)
        later = asyncio.create_task(vector(engine, "ab", "one"))
        let_go(loader.alive["one"])
        assert await running == A + 1
        await unloading
        assert await later == AB + 1
        assert loader.loads == ["one", "one"]
        loader.garbage = GIGABYTE
        await engine.unload("one")
        assert loader.garbage == 0, "memory has been given back"
        await engine.unload("one")
        assert status(engine, "one").state is ModelState.UNLOADED
        assert not loader.alive
        engine.abort()


async def test_a_command_that_would_wait_too_long_is_refused_and_the_model_serves_on() -> None:
    loader = FakeLoader()
    async with engine_with(
        loader, *entries("one"), request_timeout=0.2, rerank_gpu_timeout=0.1
    ) as engine:
        running = await busy(engine, loader, "one")
        with pytest.raises(UnavailableError, match="still in use"):
            await engine.unload("one")
        let_go(loader.alive["one"])
        assert await running == A + 1
        assert await vector(engine, "ab", "one") == AB + 1
        assert loader.loads == ["one"]


async def test_a_command_that_waits_is_refused_when_the_service_is_stopped() -> None:
    loader = FakeLoader()
    async with engine_with(loader, *entries("one")) as engine:
        running = await busy(engine, loader, "one")
        unloading = asyncio.create_task(engine.unload("one"))
        await asyncio.sleep(0)
        engine.abort()
        for each in (running, unloading):
            with pytest.raises(DrainingError):
                await each
        let_go(loader.alive["one"])


async def test_closing_ends_the_thread_that_loads() -> None:
    def loaders() -> set[threading.Thread]:
        return {each for each in threading.enumerate() if each.name == "model-loader"}

    before = loaders()
    async with engine_with(FakeLoader(), *entries("one")) as engine:
        await vector(engine, "a", "one")
        (thread,) = loaders() - before
    await asyncio.to_thread(thread.join, 60)
    assert not thread.is_alive()
