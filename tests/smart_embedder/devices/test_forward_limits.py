"""The time limit of a forward, the watchdog, the alarm and the token budget."""

import asyncio
from contextlib import ExitStack

import pytest

from smart_embedder.devices.forward_limits import (
    DeviceWatchdog,
    ForwardLimit,
    OverdueAlarm,
    TokenBudget,
)
from smart_embedder.errors import InferenceTimeoutError
from tests.smart_embedder.scheduling.jobs import batch_of, job
from tests.support.skipped_time import in_skipped_time, now, run_ready, skip


def test_an_unset_time_limit_is_five_times_the_predicted_seconds() -> None:
    limit = ForwardLimit(None, minimum=30.0)
    assert limit.for_batch(batch_of(job(100)), 0.01) == 30.0
    assert limit.for_batch(batch_of(job(1024)), 0.01) == pytest.approx(5 * 10.24 * 1.5)
    assert ForwardLimit(None, 3.0).for_batch(batch_of(job(1024)), 0.0) == 3.0
    assert ForwardLimit(2.0, minimum=30.0).for_batch(batch_of(job(100)), 1.0) == 2.0, "as it is set"


@pytest.mark.parametrize(
    ("time_limits", "seconds"),
    [([None], 2.0), ([60.0], 60.0), ([1.0, None, 0.5], 2.0)],
)
def test_the_time_limit_of_a_device_is_the_longest_of_its_jobs(time_limits, seconds) -> None:
    """The time that jobs have spent before does not count, as the device is not stuck."""
    jobs = [job(10, time_limit=limit, time_spent=0.4) for limit in time_limits]
    assert ForwardLimit(2.0, minimum=30.0).for_device(batch_of(*jobs), 0.0) == seconds


@in_skipped_time
async def test_a_device_is_stuck_after_twice_the_longest_limit_and_reported_once() -> None:
    reported: list[float] = []
    began = now()
    watchdog = DeviceWatchdog(lambda: reported.append(now() - began))
    assert watchdog.stuck_seconds == 0
    await asyncio.sleep(5)
    began = now()
    with ExitStack() as second:
        with watchdog.watch(2.0):
            await asyncio.sleep(1)
            second.enter_context(watchdog.watch(5.0))
            await asyncio.sleep(8.9)
            assert (reported, watchdog.stuck_seconds) == ([], 0.0)
            await asyncio.sleep(0.2)
            assert reported == [pytest.approx(10.01, abs=0.02)]
            assert watchdog.stuck_seconds == pytest.approx(10.1, abs=0.01)
        # The first forward has returned: the limit of the second starts now.
        assert watchdog.stuck_seconds == 0
        await asyncio.sleep(9.9)
        assert watchdog.stuck_seconds == 0
        await asyncio.sleep(0.2)
        assert reported[1:] == [pytest.approx(20.11, abs=0.01)]
    await asyncio.sleep(100)
    assert (len(reported), watchdog.stuck_seconds) == (2, 0.0)


@in_skipped_time
async def test_each_job_fails_at_its_own_time_limit() -> None:
    spent = job(10, time_limit=60.0, time_spent=56.0)
    spent.inference_seconds = 1.0
    batch = batch_of(job(10), spent, job(10, time_limit=1.0), job(10, time_limit=9.0))
    began = [0.0]
    alarm = OverdueAlarm(lambda: batch, lambda: began[0], lambda _: 2.0, lambda _: 0.0)
    # The wait for the device does not count.
    await asyncio.sleep(20)
    jobs, failed = [part.job for part in batch.slices], []
    assert not any(overdue.resolved for overdue in jobs)
    began[0] = now()
    for _ in range(3):
        await asyncio.sleep(1.01)
        failed.append([overdue.resolved for overdue in jobs])
    assert failed == [
        [False, False, True, False],
        [True, False, True, False],
        [True, True, True, False],
    ]
    alarm.cancel()
    await asyncio.sleep(20)
    assert not jobs[3].resolved
    messages = [
        "the forward took longer than 2 seconds (GPU_PROCESS_TIMEOUT)",
        "the forwards took longer than 60 seconds (RERANK_GPU_TIMEOUT)",
    ]
    for overdue, message in zip(jobs, messages, strict=False):
        with pytest.raises(InferenceTimeoutError) as error:
            await overdue.result()
        assert str(error.value) == message


@in_skipped_time
@pytest.mark.parametrize("after", [0.5, 3.0, 3.9])
async def test_time_during_which_the_process_is_stopped_does_not_count(after: float) -> None:
    """The limits of the device and of its jobs move by that time."""
    reported: list[float] = []
    watchdog = DeviceWatchdog(lambda: reported.append(now()))
    batch = batch_of(job(10), job(10, time_limit=3.0))
    jobs = [part.job for part in batch.slices]
    began = now()
    with watchdog.watch(2.0):
        alarm = OverdueAlarm(
            lambda: batch, lambda: began, lambda _: 2.0, watchdog.get_stopped_seconds
        )
        await asyncio.sleep(after)
        resolved = [waiting.resolved for waiting in jobs]
        skip(100)
        assert watchdog.stuck_seconds == 0, "read before the next iteration of the loop"
        await run_ready()
        assert ([waiting.resolved for waiting in jobs], reported) == (resolved, [])
        assert watchdog.get_stopped_seconds(began) == pytest.approx(100, abs=1)
        assert watchdog.get_stopped_seconds(now()) == 0
        await asyncio.sleep(4.0 + 1.0 - after)
        assert [waiting.resolved for waiting in jobs] == [True, True]
        assert reported == [pytest.approx(began + 104, abs=1)]
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
def test_a_token_budget_shrinks_to_half_of_the_failed_tokens_and_recovers(
    failed, recoveries, left
) -> None:
    budget = TokenBudget(1000)
    for tokens in failed:
        budget.shrink(tokens)
    for _ in range(recoveries):
        budget.recover()
    assert budget.limits.max_tokens == left
