"""Several devices behind one queue: sharing of work, failed and stuck devices, further models."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from app.http_metrics import Metrics
from smart_embedder.core import EngineCore
from smart_embedder.devices.pool import DevicePool
from smart_embedder.errors import (
    DeviceCrashedError,
    DeviceFailedError,
    OutOfMemoryError,
    UnhealthyError,
)
from smart_embedder.interface import DefaultModels, Measured, PlacedModels
from smart_embedder.requests import EmbedRequest, Purpose
from smart_embedder.results import EmbeddingResult
from smart_embedder.scheduling.queue import JobQueue
from smart_embedder.settings import EngineSettings
from tests.smart_embedder.devices.virtual_device import VirtualThread
from tests.smart_embedder.engines import entered, let_go
from tests.smart_embedder.fakes import NO_MORE, FakeModel, loaded, placed
from tests.smart_embedder.scheduling.jobs import job
from tests.support.accelerator import accelerator_error, broken_memory
from tests.support.skipped_time import in_skipped_time, run_ready


def on(names: str, *copies: FakeModel, seconds_per_token: float = 0.0) -> PlacedModels:
    """A model with a copy on each of the devices with these names."""
    named = zip(names.split(), copies, strict=True)
    placements = [(replace(loaded(copy).device, name=name), copy) for name, copy in named]
    return placed(placements, seconds_per_token=seconds_per_token)


@asynccontextmanager
async def engine_of(*models: FakeModel, **settings: float) -> AsyncIterator[EngineCore]:
    """An engine with a device for each model; the forwards are held."""
    for model in models:
        model.held = True
    names = " ".join(f"device-{number}" for number, _ in enumerate(models, 1))
    default = DefaultModels((on(names, *models),), NO_MORE)
    async with EngineCore(
        EngineSettings(reranker_model="none", **settings), lambda _: default
    ) as engine:
        yield engine


async def occupy(engine: EngineCore, *models: FakeModel) -> "list[asyncio.Task]":
    """Send each device a request as large as the token budget: the letters a, b, ..."""
    tasks = []
    for letter, model in zip("abcde", models, strict=False):
        tasks.append(asyncio.create_task(engine.embed(EmbedRequest([letter * 10]))))
        await entered(model)
    return tasks


def letters(*results: EmbeddingResult, length: int = 10) -> str:
    """The letter of each text."""
    vectors = [embedding.dense[0] for result in results for embedding in result.embeddings]
    return "".join(chr(int(vector) // length) for vector in vectors)


@pytest.mark.parametrize("code", [214, 700, None])
async def test_a_failed_device_hands_its_batch_over_unless_the_batch_crashed_it(
    code: int | None,
) -> None:
    models = FakeModel(), FakeModel()
    async with engine_of(*models) as engine:
        suspect, other = await occupy(engine, *models)
        models[0].failures.append(accelerator_error(code, "an illegal memory access"))
        let_go(*models)
        if code == 214:
            assert letters(await suspect) == "a"
        else:
            with pytest.raises(DeviceCrashedError, match="computed on no other") as failed:
                await suspect
            assert failed.value.retry_after is None
        assert (engine.failed_devices, engine.failure) == (["device-1"], None)
        later = (engine.embed(EmbedRequest([letter * 10])) for letter in "cdefgh")
        assert letters(await other, *await asyncio.gather(*later)) == "bcdefgh"
    assert len(models[0].batches) == 1


async def test_the_engine_is_unhealthy_when_the_last_device_has_failed() -> None:
    models = FakeModel(), FakeModel()
    async with engine_of(*models) as engine:
        for model in models:
            model.failures.append(broken_memory())
            model.held = False
        # Six batches: the last device fails with its own, and no device is left for the others.
        requests = [engine.embed(EmbedRequest([letter * 10])) for letter in "abcdef"]
        results = await asyncio.gather(*requests, return_exceptions=True)
        assert all(isinstance(result, UnhealthyError) for result in results)
        assert sum(isinstance(result, DeviceFailedError) for result in results) == 1
        assert engine.failed_devices == ["device-1", "device-2"]
        assert "every device has failed" in str(engine.failure)
        with pytest.raises(UnhealthyError, match="restarted"):
            await engine.embed(EmbedRequest(["later"]))


async def test_a_batch_that_failed_on_two_devices_is_not_handed_over_again() -> None:
    models = FakeModel(), FakeModel(), FakeModel()
    async with engine_of(*models) as engine:
        poison, *others = await occupy(engine, *models)
        models[0].failures.append(broken_memory())
        models[1].failures += [None, broken_memory()]
        let_go(*models[:2])  # The third device is busy until the second has failed too.
        with pytest.raises(DeviceFailedError, match="while it computed this"):
            await poison
        let_go(models[2])
        others.append(engine.embed(EmbedRequest(["d" * 10])))
        assert letters(*await asyncio.gather(*others)) == "bcd"
        assert engine.failed_devices == ["device-1", "device-2"]


# In virtual time.


class VirtualPool(DevicePool):
    """A pool without threads; a forward takes `seconds` of virtual time on each device."""

    def __init__(self, seconds: float = 1.0, **settings: object) -> None:
        self.queue, self.seconds = JobQueue(), seconds
        self.threads: dict[str, VirtualThread] = {}
        super().__init__(EngineSettings(**settings), self.queue, Metrics(), self._make)

    def _make(self, name: str, prepare: object) -> VirtualThread:
        self.threads[name] = VirtualThread()
        if callable(prepare):
            prepare()
        return self.threads[name]

    @asynccontextmanager
    async def started(self, default: PlacedModels):
        await self.add(default, thoroughly=True, is_default=True)
        await run_ready()
        for thread in self.threads.values():
            thread.seconds = self.seconds
        yield self
        await self.close(1)


@in_skipped_time
async def test_retry_after_is_estimated_from_the_waiting_tokens() -> None:
    """The device computes ten tokens a second, and ten in a forward."""
    model = FakeModel()
    async with VirtualPool(10.0).started(on("cpu", model, seconds_per_token=0.099)) as pool:
        assert pool.estimate_retry_after(Purpose.EMBEDDING) == 1
        pool.queue.put(job(10, model=model, client="a"))
        await run_ready()
        assert pool.estimate_retry_after(Purpose.EMBEDDING) == 1, "a second of the forward is left"
        pool.queue.put(job(5, 10, 10, 10, model=model, client="a"))
        # 25 tokens are taken before the last forward, which the last 10 tokens fill.
        assert pool.estimate_retry_after(Purpose.EMBEDDING) == 4
        assert pool.estimate_retry_after(Purpose.RERANKING) == 1
        pool.queue.put(job(5, 10, 10, 10, 2, model=model, client="b"))
        # As many tokens of the other client are taken in the meantime.
        assert pool.estimate_retry_after(Purpose.EMBEDDING) == 6
        pool.queue.put(job(30, client="c", model=model, purpose=Purpose.RERANKING))
        assert pool.estimate_retry_after(Purpose.RERANKING) == 10, "30 of each client, and a second"


@in_skipped_time
async def test_a_batch_waits_batch_wait_ms_for_more_jobs() -> None:
    model = FakeModel()
    async with VirtualPool(batch_wait_ms=50).started(on("cpu", model)) as pool:
        jobs = [job(length, model=model) for length in (2, 3, 4)]
        for queued in jobs:
            pool.queue.put(queued)
            await asyncio.sleep(0.04)
        for queued in jobs:
            await queued.result()
    assert model.batches == [[2, 3], [4]]


@in_skipped_time
async def test_failed_devices_do_not_count_for_retry_after() -> None:
    first, second = FakeModel(), FakeModel()
    models = on("first second", first, second, seconds_per_token=0.1)
    async with VirtualPool().started(models) as pool:
        first.failures.append(broken_memory())
        second.failures.append(None)
        jobs = [job(10, model=first) for _ in range(2)]
        for queued in jobs:
            pool.queue.put(queued)
        for queued in jobs:
            await queued.result()
        assert (pool.failed, pool.failure) == (["first"], None)
        assert pool.serves(first), "by its replica"
        assert not pool.is_using(first)
        pool.queue.put(job(10, 10, 10, 10, model=first))
        await run_ready()
        assert pool.is_using(first)
        # One device of ten tokens a second, and not two.
        assert pool.estimate_retry_after(Purpose.EMBEDDING) == pytest.approx(3, abs=1)


def recording(model: FakeModel, device: str, events: list[str]) -> PlacedModels:
    """A model that adds its measurement and the preparation of a thread to `events`."""

    def measure(thoroughly: bool) -> Iterator[Measured | None]:
        events.append(f"{device} {'thoroughly' if thoroughly else 'in short'}")
        yield None
        yield Measured(20, 0.5)

    (copy,) = on(device, model).models
    copy = replace(copy, measure=measure, prepare_thread=lambda: events.append("prepared"))
    return PlacedModels((copy,), lambda: None)


@in_skipped_time
async def test_a_further_model_is_measured_and_served_on_its_device_until_it_is_removed() -> None:
    default, model, events = FakeModel(), FakeModel(), list[str]()
    model.name = "further"
    async with VirtualPool(max_batch_sequences=3).started(on("cpu", default)) as pool:
        assert not pool.serves(model)
        key = await pool.add(recording(model, "cpu", events), thoroughly=False)
        assert (key, events) == (model, ["cpu in short"])
        assert pool.token_budgets(model) == {"cpu": 20}
        assert pool.token_budgets(default) == {"cpu": 10}
        pool.queue.put(asked := job(2, 2, 2, 2, model=model))
        assert (pool.is_using(model), pool.is_using(default)) == (True, False), "it waits"
        await asked.result()
        pool.queue.put(last := job(2, model=model))
        await run_ready()
        assert (pool.is_using(model), pool.is_using(default)) == (True, False), "it computes"
        await last.result()
        assert [len(batch) for batch in model.batches] == [3, 1, 1]
        pool.remove(model)
        assert not pool.serves(model)
        assert pool.token_budgets(model) == {}
        assert pool.serves(default)


@in_skipped_time
async def test_the_engine_stays_healthy_when_a_device_without_default_models_fails() -> None:
    default, model, events = FakeModel(), FakeModel(), list[str]()
    async with VirtualPool().started(on("cpu", default)) as pool:
        await pool.add(recording(model, "other", events), thoroughly=False)
        assert events == ["prepared", "other thoroughly"], "no request waits for this device"
        model.failures.append(broken_memory())
        pool.queue.put(fails := job(2, model=model))
        waits = job(2, model=model)
        pool.queue.put(waits)
        for failed in (fails, waits):
            with pytest.raises(UnhealthyError):
                await failed.result()
        assert (pool.failed, pool.failure) == (["other"], None)
        pool.queue.put(serves := job(2, model=default))
        await serves.result()
        default.failures.append(broken_memory())
        pool.queue.put(last := job(2, model=default))
        with pytest.raises(UnhealthyError):
            await last.result()
        assert pool.all_failed
        pool.queue.put(late := job(2, model=default))
        with pytest.raises(UnhealthyError, match="every device has failed"):
            await late.result()


@in_skipped_time
async def test_a_model_whose_measurement_fails_is_removed_from_all_devices() -> None:
    model = FakeModel()

    def measure(_thoroughly: bool) -> Iterator[Measured | None]:
        yield None
        raise MemoryError

    (first,) = recording(model, "cpu", []).models
    broken = replace(first, measure=measure)
    second = replace(broken, device=replace(first.device, name="other"))
    async with VirtualPool().started(on("cpu", FakeModel())) as pool:
        for models in ((broken,), (first, second)):
            with pytest.raises(OutOfMemoryError):
                await pool.add(PlacedModels(models, lambda: None), thoroughly=True)
            assert not pool.serves(model)


@in_skipped_time
async def test_jobs_that_wait_for_stuck_devices_fail_until_a_device_returns() -> None:
    first, second = FakeModel(), FakeModel()
    models = on("first second", first, second)
    pool = VirtualPool(100.0, gpu_process_timeout=3)
    async with pool.started(models):
        for client in "ab":
            pool.queue.put(job(10, model=first, client=client))
            await run_ready()
        pool.queue.put(waits := job(10, model=first, client="c"))
        await asyncio.sleep(5)
        assert (pool.stuck_seconds, waits.resolved) == (0, False)
        await asyncio.sleep(2)
        assert pool.stuck_seconds == pytest.approx(7, abs=0.1)
        assert "has not come back" in str(pool.failure)
        with pytest.raises(UnhealthyError, match="does not come back from a forward"):
            await waits.result()
        for thread in pool.threads.values():
            thread.seconds = 1.0
        pool.queue.put(too_early := job(10, model=first, client="c"))
        with pytest.raises(UnhealthyError, match="does not come back from a forward"):
            await too_early.result()
        await asyncio.sleep(100)
        assert (pool.stuck_seconds, pool.failure) == (0, None)
        pool.queue.put(late := job(10, model=first, client="c"))
        await asyncio.sleep(100)
        assert late.resolved
        assert first.batches + second.batches == [[10]] * 3


@in_skipped_time
async def test_no_waiting_job_fails_while_one_of_two_devices_is_stuck() -> None:
    first, second = FakeModel(), FakeModel()
    models = on("first second", first, second)
    async with VirtualPool(1.0, gpu_process_timeout=3).started(models) as pool:
        pool.threads["device-0"].seconds = 100.0
        pool.queue.put(job(10, model=first, client="a"))
        await run_ready()
        pool.queue.put(others := job(*[10] * 20, model=first, client="b"))
        await others.result()
        assert len(first.batches + second.batches) == 21
        assert pool.stuck_seconds > 0
