"""The executor of a device in virtual time: batches, timings, faults and preemption."""

import asyncio
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from smart_embedder.errors import (
    DeviceCrashedError,
    DeviceFailedError,
    InferenceError,
    InferenceTimeoutError,
    OutOfMemoryError,
)
from smart_embedder.requests import Purpose
from tests.smart_embedder.devices.virtual_device import VirtualDevice, numbers
from tests.smart_embedder.fakes import FakeModel
from tests.support.accelerator import accelerator_error
from tests.support.skipped_time import in_skipped_time, now, run_ready


@in_skipped_time
async def test_the_rate_of_a_device_is_measured_at_startup_and_then_by_its_forwards() -> None:
    async with VirtualDevice(2.0, seconds_per_token=0.1).running() as device:
        assert device.executor.tokens_per_second == 10
        await device.compute(10)
        assert device.executor.tokens_per_second == pytest.approx(5, rel=0.01)
        device.thread.seconds = 1.0
        await device.compute(10)
        assert device.executor.tokens_per_second == pytest.approx(6, rel=0.01), "a fifth of it"
    assert VirtualDevice(2.0).executor.tokens_per_second == 0
    async with VirtualDevice(0.0).running() as at_once:
        await at_once.compute(10)
        assert at_once.executor.tokens_per_second > 1e6, "its clock did not move"


@in_skipped_time
async def test_the_expected_seconds_of_a_forward_follow_the_rate_of_its_model() -> None:
    async with VirtualDevice(4.0, FakeModel(), FakeModel()).running() as device:
        slow, quick = device.models
        assert device.executor.seconds_left == 0
        await device.compute(8, model=slow)
        device.thread.seconds = 1.0
        await device.compute(8, model=quick)
        expected = {slow: 4.0, quick: 1.0}
        device.thread.seconds = 10.0
        for model, seconds in expected.items():
            running = device.put(8, model=model)
            await run_ready()
            assert device.executor.seconds_left == pytest.approx(seconds, rel=0.01)
            await asyncio.sleep(seconds / 2)
            assert device.executor.seconds_left == pytest.approx(seconds / 2, rel=0.01)
            await asyncio.sleep(seconds / 2 + 2)
            # Longer than expected: half as long again.
            assert device.executor.seconds_left == pytest.approx((seconds + 2) / 2, rel=0.01)
            await running.result()
        assert device.executor.seconds_left == 0


@in_skipped_time
async def test_a_gpu_launches_a_second_batch_and_counts_no_second_twice() -> None:
    async with VirtualDevice(2.0, gpu=True).running() as device:
        jobs = [device.put(10) for _ in range(2)]
        await run_ready(20)
        assert len(device.executor.batches) == 2
        # A batch is formed only when it can be launched, so these two jobs share one.
        for _ in range(2):
            jobs.append(device.put(5))
            await run_ready(20)
        began = now()
        for job in jobs:
            await job.result()
        assert now() - began == pytest.approx(6, rel=0.01)
        assert [job.inference_seconds for job in jobs] == [pytest.approx(2, rel=0.01)] * 4
        assert device.model.batches == [[10], [10], [5, 5]]
        assert device.executor.tokens_per_second == pytest.approx(5, rel=0.01)
        assert device.executor.batches == []


@in_skipped_time
async def test_metrics_count_each_forward_and_each_queue_wait_once() -> None:
    async with VirtualDevice(2.0).running() as device:
        texts, pair = device.put(3, 3), device.put(4, purpose=Purpose.RERANKING)
        for job in (texts, pair):
            await job.result()
        value = device.metrics.value
        assert value("embedder_tokens_processed_total", model="fake") == 10
        assert value("embedder_batch_tokens_sum") == 10
        assert value("embedding_batch_size_sum") == 2
        assert value("embedding_gpu_inference_duration_seconds_sum") == pytest.approx(2, rel=0.01)
        assert value("rerank_inference_duration_seconds_sum") == pytest.approx(2, rel=0.01)
        waited = value("embedder_queue_wait_seconds_sum")
        for job in (device.put(10, 10), device.put(10)):
            await job.result()
        assert value("rerank_inference_duration_seconds_count") == 1
        assert value("embedder_queue_wait_seconds_count") == 4
        assert value("embedder_queue_wait_seconds_sum") == pytest.approx(waited + 2, rel=0.01)


@in_skipped_time
async def test_out_of_memory_halves_the_budget_and_forwards_that_fit_restore_it() -> None:
    async with VirtualDevice(1.0, budget=1000).running() as device:
        device.model.failures = [MemoryError(), None, MemoryError()]
        assert await device.compute(*[50] * 4) == [0] * 4
        # Forwards of 200, 100, 100, 50 and 50 tokens: halved twice, and restored three times.
        assert device.model.batches == [[50] * 4, [50] * 2, [50] * 2, [50], [50]]
        assert device.freed == [1, 3], "before each half is tried"
        assert device.budgets[device.model].limits.max_tokens == 50 + 2 * 10
        assert device.metrics.value("embedder_out_of_memory_splits_total") == 2
        # One of two requests does not fit alone, and only that one fails.
        device.model.failures = [MemoryError()] * 2
        failing, other = device.put(4), device.put(5)
        with pytest.raises(OutOfMemoryError):
            await failing.result()
        assert numbers(await other.result()) == [0]
        assert device.model.batches[5:] == [[4, 5], [4], [5]]


@pytest.mark.parametrize("error", [ValueError("secret"), InferenceError("the thread ended")])
@in_skipped_time
async def test_a_failed_forward_is_logged_if_its_error_is_unknown_and_the_next_one_runs(
    error: Exception,
) -> None:
    async with VirtualDevice(1.0).running() as device:
        device.model.failures = [error]
        is_known = isinstance(error, InferenceError)
        message = "the thread ended" if is_known else "the model failed on this request"
        with capture_logs() as log, pytest.raises(InferenceError, match=f"^{message}$"):
            await device.compute(4)
        assert [entry["event"] for entry in log] == ([] if is_known else ["batch_failed"])
        assert await device.compute(4) == [0]


@in_skipped_time
async def test_jobs_cancelled_while_their_batch_waits_for_the_thread_are_not_computed() -> None:
    async with VirtualDevice(1.0).running() as device:
        for stay in (True, False):
            device.model.batches.clear()
            measuring = asyncio.create_task(device.thread.run(lambda: None))
            await run_ready()
            left, other = device.put(4), device.put(5)
            await run_ready(20)
            assert len(device.executor.batches) == 1
            rate = device.executor.tokens_per_second
            left.cancel()
            if not stay:
                other.cancel()
            await measuring
            await asyncio.sleep(2)
            assert device.model.batches == ([[5]] if stay else [])
        assert device.executor.tokens_per_second == rate, "nothing was computed"
        assert await device.compute(3) == [0]


@in_skipped_time
async def test_the_wait_for_the_thread_does_not_count_for_the_time_limit() -> None:
    async with VirtualDevice(2.0, seconds_per_token=0.5, fixed=3.0).running() as device:
        measuring = asyncio.create_task(device.thread.run(lambda: None))
        await run_ready()
        waits = device.put(4)
        await run_ready(20)
        assert device.executor.seconds_left == pytest.approx(2, rel=0.01), "of its forward"
        await measuring
        assert numbers(await waits.result()) == [0]
        assert waits.inference_seconds == pytest.approx(2, abs=0.01)


@pytest.mark.parametrize("gpu", [False, True])
@in_skipped_time
async def test_an_overdue_forward_fails_its_requests_and_the_next_has_its_own_time_limit(
    gpu: bool,
) -> None:
    async with VirtualDevice(5.0, gpu=gpu, fixed=3.0).running() as device:
        began, slow, behind = now(), device.put(10), device.put(10)
        with pytest.raises(InferenceTimeoutError, match="longer than 3 seconds"):
            await slow.result()
        assert now() - began == pytest.approx(3, abs=0.01)
        assert device.executor.watchdog.stuck_seconds == 0
        await asyncio.sleep(1)
        device.thread.seconds = 2.0
        assert numbers(await behind.result()) == [0]
        assert now() - began == pytest.approx(7, abs=0.1)
        assert device.unavailable == []


@pytest.mark.parametrize("has_other", [True, False])
@in_skipped_time
async def test_a_batch_not_begun_when_its_device_fails_is_handed_over(has_other: bool) -> None:
    model = FakeModel()
    async with VirtualDevice(1.0, model, gpu=True).running() as device:
        if has_other:
            device.queue.add_consumer(lambda served: served is model)
        model.asynchronous, model.failures = True, [accelerator_error(719)]
        crashes = device.put(10)
        await run_ready(20)
        launching = device.executor.launching
        launching.seconds = 3.0
        measuring = asyncio.create_task(launching.run(lambda: None))
        await run_ready()
        waits = device.put(9)
        await run_ready(20)
        assert len(device.executor.batches) == 2
        with pytest.raises(DeviceCrashedError):
            await crashes.result()
        await measuring
        await asyncio.sleep(5)
        assert model.batches == [[10]]
        if has_other:
            batch = device.queue.take(lambda _: device.budgets[model].limits)
            assert batch is not None
            assert (batch.handed_over, batch.tokens) == (False, 9)
        else:
            with pytest.raises(DeviceFailedError, match="before it computed this"):
                await waits.result()


@in_skipped_time
async def test_a_batch_that_failed_on_another_device_runs_alone() -> None:
    async with VirtualDevice(2.0, gpu=True).running() as device:
        device.queue._consumers.clear()
        suspect = device.put(10)
        taken = device.queue.take(lambda _: device.budgets[device.model].limits)
        assert taken is not None
        device.queue._consumers.append(device.executor._consumer)
        before = device.put(9)
        await run_ready(20)
        device.queue.hand_over(replace(taken, handed_over=True))
        after = device.put(8)
        await run_ready(20)
        assert device.model.batches == [[9]]
        assert len(device.executor.batches) == 2
        await before.result()
        await run_ready(20)
        assert device.model.batches == [[9], [10]], "it runs alone"
        await suspect.result()
        await after.result()
        assert device.model.batches == [[9], [10], [8]]
        assert device.metrics.value("embedder_queue_wait_seconds_count") == 2


def preemptible(seconds_per_token: float = 0.05) -> VirtualDevice:
    """A CPU on which 200 tokens take ten seconds."""
    return VirtualDevice(10.0, budget=1000, seconds_per_token=seconds_per_token, fixed=1000.0)


@in_skipped_time
async def test_a_short_job_preempts_a_long_forward_and_does_not_count_for_its_seconds() -> None:
    """It does not count for the rate of the device either."""
    async with preemptible().running() as device:
        long = device.put(200, client="a")
        await asyncio.sleep(1)
        device.thread.seconds = 2.0
        short = device.put(7, client="b")
        waits = device.put(8, client="c")
        await short.result()
        assert now() == pytest.approx(1003, abs=0.1)
        await waits.result()
        assert not long.resolved
        await long.result()
        assert now() == pytest.approx(1010, abs=0.1)
        assert device.model.batches == [[200], [7], [8]]
        assert long.inference_seconds == pytest.approx(10 - 2 - 2, abs=0.1)
        assert short.inference_seconds == pytest.approx(2, abs=0.1)
        assert device.executor.tokens_per_second == pytest.approx(200 / 6, rel=0.05)
        assert device.executor.batches == []


@in_skipped_time
@pytest.mark.parametrize(
    ("expected_seconds", "batches"), [(0.009, [[200]]), (0.011, [[200], [7]])], ids=str
)
async def test_a_forward_of_less_than_10_ms_is_not_preempted(expected_seconds, batches) -> None:
    async with preemptible(expected_seconds / 200).running() as device:
        long = device.put(200, client="a")
        await asyncio.sleep(1)
        device.put(7)
        await long.result()
        assert device.model.batches == batches


@in_skipped_time
async def test_short_jobs_preempt_the_long_jobs_of_their_own_batch() -> None:
    async with preemptible().running() as device:
        device.thread.seconds = 4.0
        long, short = device.put(200, client="a"), device.put(5, client="b")
        await run_ready(20)
        assert sorted(device.model.batches) == [[5], [200]]
        await short.result()
        await long.result()


@in_skipped_time
async def test_there_is_no_preemption_on_a_gpu() -> None:
    async with VirtualDevice(10.0, gpu=True, budget=1000, seconds_per_token=0.05).running() as gpu:
        gpu.put(200, client="a")
        gpu.put(5, client="b")
        await run_ready(20)
        assert [sorted(batch) for batch in gpu.model.batches] == [[5, 200]]
