"""What a forward may take: seconds, set, by default, or as the probe predicts; and tokens."""

import asyncio
from contextlib import ExitStack

import pytest

from smart_embedder.devices.forward_limits import (
    DeviceWatchdog,
    ForwardLimit,
    OverdueAlarm,
    TokenBudget,
    predicted_seconds,
)
from smart_embedder.errors import InferenceTimeoutError
from tests.smart_embedder.scheduling.jobs import batch_of, job
from tests.support.skipped_time import in_skipped_time, now, skip, turns


def test_unset_it_grows_to_five_times_the_predicted_time() -> None:
    limit = ForwardLimit(None, least=30.0)
    assert limit.of_batch(batch_of(job(100)), 0.01) == 30.0
    assert limit.of_batch(batch_of(job(1024)), 0.01) == pytest.approx(5 * 10.24 * 1.5)
    assert ForwardLimit(None, 3.0).of_batch(batch_of(job(1024)), 0.0) == 3.0
    assert ForwardLimit(2.0, least=30.0).of_batch(batch_of(job(100)), 1.0) == 2.0, "as it is set"


def test_a_long_sequence_is_given_the_time_that_its_attention_takes() -> None:
    short = sum(predicted_seconds(batch_of(job(512)), 0.01) for _ in range(16))
    assert predicted_seconds(batch_of(job(8192)), 0.01) > 3 * short


@pytest.mark.parametrize(
    ("time_limits", "seconds"),
    [([None], 2.0), ([60.0], 60.0), ([1.0, None, 0.5], 2.0)],
)
def test_the_device_has_the_longest_limit_of_its_jobs(time_limits, seconds) -> None:
    """However little of it is left: that does not make the device look stuck."""
    jobs = [job(10, time_limit=limit, time_spent=0.4) for limit in time_limits]
    assert ForwardLimit(2.0, least=30.0).of_device(batch_of(*jobs), 0.0) == seconds


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
            assert told == [pytest.approx(10.01, abs=0.02)]
            assert watchdog.stuck_seconds == pytest.approx(10.1, abs=0.01)
        # The first has come back: from now on the second has its time.
        assert watchdog.stuck_seconds == 0
        await asyncio.sleep(9.9)
        assert watchdog.stuck_seconds == 0
        await asyncio.sleep(0.2)
        assert told[1:] == [pytest.approx(20.11, abs=0.01)]
    await asyncio.sleep(100)
    assert (len(told), watchdog.stuck_seconds) == (2, 0.0)


@in_skipped_time
async def test_each_request_fails_when_its_own_time_is_over_and_the_rest_is_waited_for() -> None:
    spent = job(10, time_limit=60.0, time_spent=56.0)
    spent.inference_seconds = 1.0
    batch = batch_of(job(10), spent, job(10, time_limit=1.0), job(10, time_limit=9.0))
    began = [0.0]
    alarm = OverdueAlarm(lambda: batch, lambda: began[0], lambda _: 2.0, lambda _: 0.0)
    # The wait for the device does not count.
    await asyncio.sleep(20)
    jobs, failed = [part.job for part in batch.slices], []
    assert not any(each.resolved for each in jobs)
    began[0] = now()
    for _ in range(3):
        await asyncio.sleep(1.01)
        failed.append([each.resolved for each in jobs])
    assert failed == [
        [False, False, True, False],
        [True, False, True, False],
        [True, True, True, False],
    ]
    alarm.cancel()
    await asyncio.sleep(20)
    assert not jobs[3].resolved
    said = ["2 seconds (GPU_PROCESS_TIMEOUT)", "60 seconds (RERANK_GPU_TIMEOUT)"]
    for failed_job, what, sentence in zip(jobs, ("forward", "forwards"), said, strict=False):
        with pytest.raises(InferenceTimeoutError) as error:
            await failed_job.result()
        assert str(error.value) == f"the {what} took longer than {sentence}"


@in_skipped_time
@pytest.mark.parametrize("after", [0.5, 3.0, 3.9])
async def test_a_stop_of_the_process_is_no_time_of_its_forward(after: float) -> None:
    """Neither the device nor a request is over its limit by it, and both are later."""
    told: list[float] = []
    watchdog = DeviceWatchdog(lambda: told.append(now()))
    batch = batch_of(job(10), job(10, time_limit=3.0))
    jobs = [part.job for part in batch.slices]
    began = now()
    with watchdog.over(2.0):
        alarm = OverdueAlarm(lambda: batch, lambda: began, lambda _: 2.0, watchdog.stopped_since)
        await asyncio.sleep(after)
        overdue = [one.resolved for one in jobs]
        skip(100)
        assert watchdog.stuck_seconds == 0, "asked before the loop has turned"
        await turns()
        assert ([one.resolved for one in jobs], told) == (overdue, [])
        assert watchdog.stopped_since(began) == pytest.approx(100, abs=1)
        assert watchdog.stopped_since(now()) == 0
        await asyncio.sleep(4.0 + 1.0 - after)
        assert [one.resolved for one in jobs] == [True, True]
        assert told == [pytest.approx(began + 104, abs=1)]
        alarm.cancel()


@pytest.mark.parametrize(
    ("failed", "recoveries", "left"),
    [
        ([800], 0, 400),
        ([800, *[400, 200, 100, 50, 25, 12, 6, 3, 1, 1]], 0, 1),
        # A small batch that did not fit after the budget shrank does not raise it.
        ([200, 900], 0, 100),
        # It recovers slowly, and never beyond where it began.
        ([1000], 1, 510),
        ([1000], 201, 1000),
    ],
)
def test_a_budget_shrinks_to_half_of_what_was_too_much_and_recovers(
    failed, recoveries, left
) -> None:
    budget = TokenBudget(1000)
    for tokens in failed:
        budget.shrink(tokens)
    for _ in range(recoveries):
        budget.recover()
    assert budget.limits.max_tokens == left
