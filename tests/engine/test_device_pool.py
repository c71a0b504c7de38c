"""Several devices behind one queue: each works by itself, and answers as the first would."""

import asyncio
from dataclasses import replace

import pytest
import torch

from app.engine import Engine
from app.engine.loaded_models import LoadedModels
from app.errors import DeviceFailedError, InferenceError, InferenceTimeoutError, UnhealthyError
from app.settings import Settings
from tests.engine.fakes import FakeModel, loaded


def two_devices(first: FakeModel, second: FakeModel) -> LoadedModels:
    return replace(named("first", first), replicas=(named("second", second),))


def named(name: str, model: FakeModel) -> LoadedModels:
    models = loaded(model)
    return replace(models, device=replace(models.device, name=name))


def illegal_access() -> Exception:
    return torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


async def entered(model: FakeModel) -> None:
    await asyncio.to_thread(model.entered.acquire)


async def test_two_devices_work_at_the_same_time() -> None:
    models = [FakeModel(), FakeModel()]
    for model in models:
        model.held = True
    async with Engine(Settings(), loader=lambda _: two_devices(*models)) as engine:
        # Each as long as the token budget, so that one forward cannot hold both.
        requests = [asyncio.create_task(engine.embed([text * 10])) for text in "ab"]
        await asyncio.gather(*map(entered, models))
        for model in models:
            model.gate.release()
        results = await asyncio.gather(*requests)
    assert [result.embeddings[0].dense[0] for result in results] == [970, 980]


async def test_one_request_is_spread_over_both_and_comes_back_in_order() -> None:
    models = [FakeModel(), FakeModel()]
    for model in models:
        model.held = True
    async with Engine(Settings(), loader=lambda _: two_devices(*models)) as engine:
        request = asyncio.create_task(engine.embed([letter * 5 for letter in "abcdefgh"]))
        await asyncio.gather(*map(entered, models))
        for model in models:
            model.held = False
            model.gate.release()
        result = await request
    assert [e.dense[0] for e in result.embeddings] == [5 * ord(letter) for letter in "abcdefgh"]
    assert sum(len(batch) for model in models for batch in model.batches) == 8


async def test_a_device_that_fails_leaves_the_other_one_at_work() -> None:
    models = [FakeModel(), FakeModel()]
    for model in models:
        model.held = True
    async with Engine(Settings(), loader=lambda _: two_devices(*models)) as engine:
        requests = [asyncio.create_task(engine.embed([text * 10])) for text in "ab"]
        await asyncio.gather(*map(entered, models))
        models[0].failures.append(RuntimeError("unwell"))
        for model in models:
            model.gate.release()
        results = await asyncio.gather(*requests, return_exceptions=True)
    assert sorted(isinstance(result, InferenceError) for result in results) == [False, True]


async def test_one_stuck_device_is_a_failure_of_the_whole() -> None:
    models = [FakeModel(), FakeModel()]
    settings = Settings(gpu_process_timeout=0.02)
    async with Engine(settings, loader=lambda _: two_devices(*models)) as engine:
        for model in models:
            model.held = True
        stuck = asyncio.create_task(engine.embed(["a"]))
        while engine.failure is None:  # noqa: ASYNC110 - the clock must reach twice the limit
            await asyncio.sleep(0.005)
        for model in models:
            model.gate.release()
        with pytest.raises(InferenceTimeoutError):
            await stuck


async def test_a_device_that_has_failed_gets_no_further_batch_and_the_other_serves_all() -> None:
    models = [FakeModel(), FakeModel()]
    for model in models:
        model.held = True
    async with Engine(Settings(), loader=lambda _: two_devices(*models)) as engine:
        requests = [asyncio.create_task(engine.embed([text * 10])) for text in "ab"]
        await asyncio.gather(*map(entered, models))
        models[0].failures.append(illegal_access())
        for model in models:
            model.held = False
            model.gate.release()
        results = await asyncio.gather(*requests, return_exceptions=True)
        assert sorted(isinstance(result, DeviceFailedError) for result in results) == [False, True]
        assert engine.failed_devices == ["first"]
        assert engine.failure is None
        later = await asyncio.gather(*(engine.embed([letter * 10]) for letter in "cdefgh"))
    assert [result.embeddings[0].dense[0] for result in later] == [10 * ord(c) for c in "cdefgh"]
    assert len(models[0].batches) == 1


async def test_the_last_device_that_fails_is_a_failure_of_the_whole() -> None:
    models = [FakeModel(), FakeModel()]
    for model in models:
        model.failures.append(illegal_access())
    async with Engine(Settings(), loader=lambda _: two_devices(*models)) as engine:
        # Six batches: two fail on the devices, and those that wait have nowhere to go.
        requests = [engine.embed([letter * 10]) for letter in "abcdef"]
        results = await asyncio.gather(*requests, return_exceptions=True)
        assert all(isinstance(result, UnhealthyError) for result in results)
        assert sum(isinstance(result, DeviceFailedError) for result in results) == 2
        assert engine.failed_devices == ["first", "second"]
        assert "every device has failed" in str(engine.failure)
        with pytest.raises(UnhealthyError, match="restarted"):
            await engine.embed(["later"])


async def test_what_a_failed_gpu_still_computes_fails_with_it() -> None:
    model = FakeModel()
    model.asynchronous = model.held = True
    model.failures += [illegal_access(), illegal_access()]
    async with Engine(Settings(), loader=lambda _: loaded(model)) as engine:
        requests = [asyncio.create_task(engine.embed([letter * 10])) for letter in "abc"]
        await entered(model)
        await entered(model)
        model.gate.release(2)
        results = await asyncio.gather(*requests, return_exceptions=True)
    assert all(isinstance(result, UnhealthyError) for result in results)
    assert len(model.batches) == 2


async def test_too_little_memory_is_no_failed_device_whatever_class_its_error_has() -> None:
    model = FakeModel()
    model.failures.append(torch.AcceleratorError("CUDA error: out of memory"))
    async with Engine(Settings(), loader=lambda _: loaded(model)) as engine:
        result = await engine.embed(["aaa", "bbb"])
        assert engine.failed_devices == []
    assert [each.dense[0] for each in result.embeddings] == [3 * ord("a"), 3 * ord("b")]
