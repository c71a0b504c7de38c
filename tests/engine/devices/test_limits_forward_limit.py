"""How long a forward may take: set, by default, or as the probe predicts."""

import asyncio
from contextlib import ExitStack

import numpy as np
import pytest

from smart_embedder.engine import clock
from smart_embedder.engine.devices.limits import (
    DeviceWatchdog,
    ForwardLimit,
    ServiceRate,
    fail_overdue,
)
from smart_embedder.engine.records import Outputs
from smart_embedder.engine.scheduling.batcher import Batch, BatchSlice
from smart_embedder.engine.scheduling.job import Job
from smart_embedder.errors import InferenceTimeoutError
from tests.engine.fakes import FakeModel
from tests.support.skipped_time import in_skipped_time, now


def batch_of(tokens: int, time_limit: float | None = None, spent: float = 0.0) -> Batch:
    sequences = [np.zeros(tokens, np.int64)]
    outputs = Outputs(dense=True)
    job = Job(FakeModel(), sequences, outputs, time_limit=time_limit, time_spent=spent)
    return Batch(job.model, [BatchSlice(job, 0, 1)])


def test_what_was_set_holds_whatever_the_probe_says() -> None:
    limit = ForwardLimit(2.0, least=30.0, seconds_per_token=1.0)
    assert limit.of_batch(batch_of(100)) == 2.0


def test_unset_it_grows_to_five_times_the_predicted_time() -> None:
    limit = ForwardLimit(None, least=30.0, seconds_per_token=0.01)
    assert limit.of_batch(batch_of(100)) == 30.0
    assert limit.of_batch(batch_of(1024)) == pytest.approx(5 * 10.24 * 1.5)


def test_a_long_sequence_is_given_the_time_that_its_attention_takes() -> None:
    limit = ForwardLimit(None, least=0.0, seconds_per_token=0.01)
    short = [batch_of(512) for _ in range(16)]
    assert limit.of_batch(batch_of(8192)) > 3 * sum(map(limit.of_batch, short))


def test_a_model_that_was_measured_by_itself_has_its_own_time() -> None:
    batch = batch_of(1024)
    limit = ForwardLimit(None, 0.0, 0.01, {batch.model: 0.02})
    assert limit.predicted(batch) == pytest.approx(0.02 * 1024 * 1.5)
    assert limit.predicted(batch_of(1024)) == pytest.approx(0.01 * 1024 * 1.5)
    assert ForwardLimit(None, 3.0).of_batch(batch) == 3.0


@pytest.mark.parametrize(
    ("jobs", "slices", "device"),
    [
        ([(None, 0.0)], [2.0], 2.0),
        ([(60.0, 45.0)], [15.0], 60.0),
        ([(60.0, 59.9)], [pytest.approx(0.1)], 60.0),  # That does not make the device look stuck.
        ([(1.0, 0.0), (None, 0.0), (0.5, 0.2)], [1.0, 2.0, 0.3], 2.0),
    ],
)
def test_each_request_is_held_to_what_is_left_of_its_own_limit(jobs, slices, device) -> None:
    limits = ForwardLimit(2.0, least=30.0).split(joined(*(batch_of(10, *each) for each in jobs)))
    assert limits.slices == pytest.approx(slices)
    assert limits.device == device


def joined(*batches: Batch) -> Batch:
    return Batch(batches[0].model, [part for batch in batches for part in batch.slices])


def test_the_rate_of_a_device_is_a_mean_in_which_the_latest_forward_is_a_fifth() -> None:
    rate = ServiceRate()
    rate.observe(100, 1.0)
    assert rate.tokens_per_second == 100
    rate.observe(300, 1.5)
    assert rate.tokens_per_second == pytest.approx(120)
    rate.observe(1, 0.0)  # A clock that did not move.
    assert rate.tokens_per_second > 1e6


@pytest.fixture
def skipped(monkeypatch) -> None:
    monkeypatch.setattr(clock, "now", now)


@pytest.mark.usefixtures("skipped")
@in_skipped_time
async def test_a_device_is_stuck_after_twice_the_longest_limit_and_told_once() -> None:
    told: list[float] = []
    began = now()
    watchdog = DeviceWatchdog(lambda: told.append(now() - began))
    assert watchdog.stuck_seconds == 0
    await asyncio.sleep(5)
    began = now()
    with ExitStack() as second:
        with watchdog.over(2.0):
            await asyncio.sleep(1)
            second.enter_context(watchdog.over(5.0))
            await asyncio.sleep(8.9)
            assert (told, watchdog.stuck_seconds) == ([], 0.0)
            await asyncio.sleep(0.2)
            assert told == [pytest.approx(10.01, abs=0.005)]
            assert watchdog.stuck_seconds == pytest.approx(10.1, abs=0.01)
        # The first has come back: from now on the second has its time.
        assert watchdog.stuck_seconds == 0
        await asyncio.sleep(9.9)
        assert watchdog.stuck_seconds == 0
        await asyncio.sleep(0.2)
        assert told[1:] == [pytest.approx(20.11, abs=0.01)]
    await asyncio.sleep(100)
    assert (len(told), watchdog.stuck_seconds) == (2, 0.0)


@pytest.mark.usefixtures("skipped")
@in_skipped_time
async def test_each_request_fails_when_its_own_time_is_over_and_the_rest_is_waited_for() -> None:
    batch = joined(batch_of(10), batch_of(10, 60.0, 57.0), batch_of(10, 1.0), batch_of(10, 9.0))
    limits = ForwardLimit(2.0, least=30.0).split(batch)
    running: asyncio.Future[list] = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(fail_overdue(batch, limits, running))
    jobs, failed = [part.job for part in batch.slices], []
    for _ in range(3):
        await asyncio.sleep(1.01)
        failed.append([job.resolved for job in jobs])
    assert failed == [
        [False, False, True, False],
        [True, False, True, False],
        [True, True, True, False],
    ]
    running.set_result([])
    await waiting
    assert not jobs[3].resolved
    said = ["2 seconds (GPU_PROCESS_TIMEOUT)", "60 seconds (RERANK_GPU_TIMEOUT)"]
    for job, what, sentence in zip(jobs, ("forward", "forwards"), said, strict=False):
        with pytest.raises(InferenceTimeoutError) as error:
            await job.result()
        assert str(error.value) == f"the {what} took longer than {sentence}"
