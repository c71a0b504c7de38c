"""The queue over time: shares, counts, consumers, batches handed over, and preemption."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from smart_embedder.errors import DeviceFailedError, UnhealthyError
from smart_embedder.requests import Purpose
from smart_embedder.scheduling.batcher import Batch, BatchLimits
from smart_embedder.scheduling.job import Job
from smart_embedder.scheduling.preemption import Preemption, split_off_short_jobs
from smart_embedder.scheduling.queue import JobQueue
from tests.smart_embedder.fakes import FakeModel
from tests.smart_embedder.scheduling.jobs import MODEL, OTHER, batch_of, job, queue_of, take
from tests.support.skipped_time import run_ready


def serves(*models: FakeModel) -> Callable[[FakeModel], bool]:
    return lambda model: model in models


def jobs_of(batch: Batch) -> list[Job]:
    return [part.job for part in batch.slices]


# Shares of jobs over time.


def test_bulk_gets_a_fifth_of_the_device_while_interactive_work_waits() -> None:
    jobs = [job(*[4] * 4000), job(*[4] * 4000, bulk=True)]
    queue = queue_of(*jobs)
    for _ in range(400):
        take(queue)
    assert [job.taken / 1600 for job in jobs] == pytest.approx([0.8, 0.2], abs=0.005)


def test_a_long_bulk_text_is_taken_though_short_ones_fit_beside_interactive_work() -> None:
    queue = queue_of(long := job(100, bulk=True))
    for number in range(100):
        queue.put(job(5 + 3 * (number % 4)))
        queue.put(job(4, bulk=True, client="b"))
        queue.put(job(4, bulk=True))
        take(queue)
        if not long.waiting:
            break
    assert not long.waiting


def test_a_long_job_beside_its_own_clients_short_ones_gets_its_share() -> None:
    queue = queue_of(long := job(*[16] * 100))
    for _ in range(100):
        while len(queue.jobs) < 20:
            queue.put(job(2))
        take(queue)
    # A twentieth of the tokens, like each of the others.
    assert long.taken in {4, 5}


# Shares of clients over time.


def test_a_client_with_one_request_at_a_time_is_always_in_the_next_batch() -> None:
    queue = queue_of(*(job(*[20] * 64, client="alice") for _ in range(300)))
    for _ in range(50):
        queue.put(bob := job(20, client="bob"))
        take(queue, 512)
        assert not bob.waiting
        queue.put(job(*[20] * 64, client="alice"))


@settings(max_examples=40)
@given(
    length=st.integers(1, 30),
    sizes=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    budget=st.integers(4, 40),
)
def test_clients_that_always_have_work_get_equal_shares_however_they_send_it(
    length, sizes, budget
) -> None:
    """Each client sends jobs of its own size, and always has enough waiting to fill a batch."""
    queue, taken = JobQueue(), Counter[str]()
    for _ in range(60):
        waiting = Counter[str]()
        for waiting_job in queue.jobs:
            waiting[waiting_job.client] += waiting_job.waiting_tokens
        for number, size in enumerate(sizes):
            client = str(number)
            while waiting[client] < budget:
                queue.put(job(*[length] * size, client=client))
                waiting[client] += length * size
        taken.update(take(queue, budget).client_tokens)
    assert max(taken.values()) - min(taken.values()) <= budget + length


def test_the_lead_of_a_client_served_by_another_device_is_limited_to_a_forward() -> None:
    """Without the limit Alice would wait until Bob has caught up."""
    queue = JobQueue()
    for _ in range(100):
        queue.put(job(100, client="alice", model=OTHER))
        take(queue, 100, serves=serves(OTHER))
        queue.put(job(1, client="bob", model=MODEL))
    queue.put(last := job(50, client="alice", model=MODEL))
    queue.put(job(*[50] * 100, client="carol", model=MODEL))
    for _ in range(6):
        take(queue, 100, serves=serves(MODEL))
    assert not last.waiting


def test_counts_of_clients_are_kept_while_they_wait_and_dropped_afterwards() -> None:
    queue = queue_of(*(job(4, client=str(number)) for number in range(50)))
    queue.put(job(*[4] * 500, client="stays"))
    for _ in range(100):
        take(queue)
    assert queue._clients.keys() == {(False, "stays")}
    queue = queue_of(leaving := job(4, client="alice"))
    leaving.cancel()
    assert not queue._clients
    assert queue._root.clock == 0, "the queue is empty"


# Waiting tokens.


@pytest.mark.parametrize(
    ("jobs", "tokens"),
    [
        ([], 0),
        ([job(5, 6, 7)], 18),
        ([job(5, purpose=Purpose.RERANKING)], 0),
        ([job(*[5] * 9), job(5, 5)], 20),
        ([job(5, 5, 5), job(3, purpose=Purpose.RERANKING)], 18),
        ([job(9, purpose=Purpose.RERANKING), job(4, client="a"), job(4, client="b")], 12),
    ],
)
def test_before_the_shortest_job_leaves_each_other_job_is_served_as_much(jobs, tokens) -> None:
    queue = queue_of(*jobs)
    assert queue.estimate_tokens_ahead(Purpose.EMBEDDING) == tokens
    for waiting in jobs:
        waiting.cancel()


# Consumers.


async def test_an_idle_consumer_is_woken_only_by_jobs_of_its_models() -> None:
    queue = JobQueue()
    consumer = queue.add_consumer(serves(MODEL))
    waits = asyncio.create_task(consumer.wait())
    await run_ready()
    queue.put(job(4, model=OTHER))
    await run_ready()
    assert not waits.done()
    queue.put(job(4))
    take(queue, serves=serves(MODEL))  # By another device, before it runs.
    await run_ready()
    assert (waits.done(), consumer.idle) == (False, True)
    queue.put(job(4))
    await run_ready()
    assert (waits.done(), consumer.idle) == (True, False)


async def test_busy_consumers_are_called_on_arrival_unless_an_idle_one_takes_the_job() -> None:
    queue, calls = JobQueue(), list[tuple[str, Job]]()
    busy, unfit, idle = (queue.add_consumer(serves(model)) for model in (MODEL, OTHER, MODEL))

    busy.on_arrival = lambda job: calls.append(("busy", job))
    unfit.on_arrival = lambda job: calls.append(("unfit", job))
    queue.put(first := job(4))
    assert calls == [("busy", first)]
    take(queue)
    waits = asyncio.create_task(idle.wait())
    await run_ready()
    queue.put(job(4))
    await run_ready()
    assert waits.done()
    assert calls == [("busy", first)]


def test_each_device_takes_the_jobs_of_its_models() -> None:
    queue = queue_of(first := job(4), second := job(4, model=OTHER), third := job(4))
    assert jobs_of(take(queue, serves=serves(MODEL), among=[second, third])) == [third]
    assert jobs_of(take(queue, serves=serves(MODEL))) == [first]
    assert queue.take(lambda _: BatchLimits(16), serves(MODEL)) is None
    assert jobs_of(take(queue, serves=serves(OTHER))) == [second]


async def test_a_batch_handed_over_is_taken_first_and_wakes_a_consumer_of_its_model() -> None:
    queue = queue_of(job(4))
    handed_over = replace(take(queue), handed_over=True)
    served, other = (
        asyncio.create_task(queue.add_consumer(serves(model)).wait()) for model in (MODEL, OTHER)
    )
    await run_ready()
    queue.hand_over(handed_over)
    await run_ready()
    assert (served.done(), other.done()) == (True, False)
    other.cancel()
    queue.put(job(4))
    assert queue.take(lambda _: BatchLimits(16), serves(OTHER)) is None
    assert take(queue, among=queue.jobs).slices != handed_over.slices, "it does not preempt"
    assert take(queue).slices == handed_over.slices
    assert queue.take(lambda _: BatchLimits(16)) is None


@pytest.mark.parametrize("stays", [1, 0])
async def test_a_batch_handed_over_is_taken_without_its_cancelled_jobs(stays) -> None:
    queue = queue_of(gone := job(4), *(here := [job(4)] * stays))
    queue.hand_over(take(queue))
    gone.cancel()
    batch = queue.take(lambda _: BatchLimits(16))
    assert (batch and jobs_of(batch)) == (here or None)
    assert not queue.has_work(serves(MODEL))


# Failures.


async def error_of(failed: Job) -> Exception:
    with pytest.raises(UnhealthyError) as raised:
        await failed.result()
    return raised.value


async def test_the_jobs_of_a_model_without_devices_fail_also_in_batches_handed_over() -> None:
    handed_over = [job(16, model=model) for model in (MODEL, OTHER)]
    queue = queue_of(*handed_over)
    for batch in [take(queue) for _ in handed_over]:
        queue.hand_over(batch)
    queue.put(waiting := job(4))
    queue.put(other := job(4, model=OTHER))
    queue.fail(DeviceFailedError("gone"), serves(MODEL))
    for failed in (handed_over[0], waiting):
        assert str(await error_of(failed)) == "gone"
    assert queue.waiting_tokens == 16 + 4
    assert [jobs_of(take(queue)) for _ in range(2)] == [[handed_over[1]], [other]]


async def test_a_closed_queue_fails_waiting_and_later_jobs() -> None:
    queue = queue_of(taken := job(16), handed_over := job(16), waiting := job(4))
    batch = take(queue)
    queue.hand_over(take(queue))
    queue.close(UnhealthyError("closed"))
    queue.hand_over(batch)
    queue.put(late := job(4))
    for failed in (taken, handed_over, waiting, late):
        assert str(await error_of(failed)) == "closed"
    assert (queue.jobs, queue.waiting_tokens) == ([], 0)
    assert not queue.has_work(lambda _: True)


# Short jobs that preempt a long forward.


def preemption(
    queue: JobQueue, *jobs: Job, seconds: float = 10.0, budget: int = 9999
) -> tuple[Preemption, list[Batch]]:
    """The preemption of a forward of these jobs, and the list of batches that it starts."""
    started, consumer = list[Batch](), queue.add_consumer(serves(MODEL, OTHER))
    batch, limits = batch_of(*jobs), BatchLimits(budget)
    return Preemption(batch, seconds, consumer, lambda _: limits, started.append), started


ARRIVALS = {
    "short, of the same client": (job(12, client="bulk"), True),
    "short, of another client": (job(5, 7), True),
    "short, of another model": (job(12, model=OTHER), True),
    "too long": (job(13), False),
    "bulk beside interactive": (job(12, bulk=True), False),
    "of a client with many tokens in the forward": (job(3, client="same"), False),
}


@pytest.mark.parametrize("case", ARRIVALS)
def test_a_job_an_eighth_as_long_and_of_no_lower_class_preempts(case: str) -> None:
    arrived, preempts = ARRIVALS[case]
    queue = queue_of(arrived)
    offered, started = preemption(queue, job(96, client="bulk"), job(20, client="same"))
    offered.offer([arrived])
    assert [jobs_of(batch) for batch in started] == ([[arrived]] if preempts else [])
    arrived.cancel()


@pytest.mark.parametrize(
    ("arrives", "length", "budget", "preempts"),
    [
        # Fewer than 12 tokens count as 12: otherwise single words would make all questions wait.
        (3, 95, 9999, False),
        (3, 96, 9999, True),
        # A preempting batch has at most 256 tokens, and no more than the token budget.
        (256, 8192, 9999, True),
        (257, 8192, 9999, False),
        (8, 8192, 7, False),
    ],
)
def test_a_job_preempts_a_forward_eight_times_as_long_within_limits(
    arrives, length, budget, preempts
) -> None:
    queue = queue_of(arrived := job(arrives))
    offered, started = preemption(queue, job(length, client="bulk"), budget=budget)
    offered.offer([arrived])
    assert bool(started) is preempts


def test_jobs_that_were_begun_or_cancelled_do_not_preempt() -> None:
    queue = queue_of(begun := job(4, 4), gone := job(4))
    take(queue, 4, among=[begun])
    gone.cancel()
    offered, started = preemption(queue, job(96, client="bulk"))
    offered.offer([begun, gone])
    assert started == []


def test_batches_preempt_one_at_a_time_and_together_no_longer_than_the_forward() -> None:
    queue = queue_of(first := job(6))
    offered, started = preemption(queue, job(96, client="bulk"), seconds=10.0)
    offered.offer([first])
    later = [job(3), job(3), job(50)]
    for arrived in later:
        queue.put(arrived)
        offered.offer([arrived])
    assert len(started) == 1
    offered.end(4.0)
    assert [jobs_of(batch) for batch in started] == [[first], later[:2]]
    queue.put(job(1))
    offered.end(6.0)
    assert len(started) == 2, "its time is used up"


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 90), min_size=1, max_size=6), st.sampled_from("abc")),
        min_size=1,
        max_size=8,
    )
)
# Short jobs of two clients: without the job of "b", the rest is less than eight times that of "a".
@example([([8], "b"), ([27], "b"), ([1, 1, 1, 22, 90, 90], "b"), ([30], "a")])
def test_a_batch_is_split_into_its_short_jobs_and_a_rest_that_is_never_empty(requests) -> None:
    jobs = [job(*lengths, client=client) for lengths, client in requests]
    batch = batch_of(*jobs)
    short, rest = split_off_short_jobs(batch)
    assert rest.slices
    assert sorted(map(id, short.slices + rest.slices)) == sorted(map(id, batch.slices))
    assert 8 * max((part.tokens for part in short.slices), default=0) <= batch.tokens


def test_short_jobs_above_the_preemption_limit_stay_in_the_batch() -> None:
    batch = batch_of(job(8192, client="bulk"), *(job(60, client=client) for client in "abcde"))
    short, rest = split_off_short_jobs(batch)
    assert (short.slices, rest.slices) == ([], batch.slices)


def test_clients_share_the_device_by_their_weights() -> None:
    jobs = [job(*[4] * 4000, client="a", client_weight=3), job(*[4] * 4000, client="b")]
    queue = queue_of(*jobs)
    for _ in range(400):
        take(queue)
    assert [job.taken / 1600 for job in jobs] == pytest.approx([0.75, 0.25], abs=0.005)


def test_a_heavy_clients_long_text_waits_no_longer_for_its_weight() -> None:
    """While it is passed over, others may be ahead of it by at most a forward."""
    queue = queue_of(long := job(16, client="a", client_weight=3))
    taken = 0
    while long.waiting:
        queue.put(job(5, client="b"))
        taken += take(queue).tokens
    assert taken <= 3 * 16
