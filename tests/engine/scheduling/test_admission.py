"""From texts to queued jobs: what is measured, and what happens to the jobs of a caller."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from smart_embedder.engine import clock
from smart_embedder.engine.scheduling.admission import Admission, TokenizerThreads, timings_of
from smart_embedder.engine.scheduling.batcher import Limits
from smart_embedder.engine.scheduling.queue import JobQueue
from smart_embedder.errors import InferenceError
from smart_embedder.observability.metrics import Metrics
from smart_embedder.observability.tracing import Stage
from tests.engine.fakes import FakeModel
from tests.engine.scheduling.jobs import job
from tests.support.skipped_time import turns


class Ticking:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def ticking(monkeypatch) -> Ticking:
    made = Ticking()
    monkeypatch.setattr(clock, "now", made)
    return made


class Desk:
    """An admission over a queue of its own."""

    def __init__(self) -> None:
        self.queue, self.metrics = JobQueue(), Metrics()
        self.threads = TokenizerThreads(1)
        self.admission = Admission(self.queue, self.threads, self.metrics)

    def take(self, budget: int = 100) -> None:
        self.batch = self.queue.take(lambda _: Limits(budget))

    def complete(self) -> None:
        assert self.batch is not None
        self.batch.complete([7] * len(self.batch.sequences), 2.0)


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.threads.close()


async def test_texts_are_tokenised_off_the_loop_and_the_time_is_told(desk, ticking) -> None:
    def call() -> str:
        ticking.time += 3
        return threading.current_thread().name

    done = await desk.admission.tokenize(FakeModel(), call, ["a"], "client")
    assert done.value.startswith("tokenizer")
    assert done.stage == Stage("tokenize", 100, 103, "fake")
    assert desk.metrics.value("embedder_tokenize_seconds_sum") == 3
    assert desk.metrics.value("embedder_tokenize_seconds_count") == 1


async def test_a_submission_is_over_when_the_device_has_taken_all_its_jobs(desk) -> None:
    first, second = job(10), job(10)
    submits = asyncio.create_task(desk.admission.submit(first, second))
    await turns()
    desk.take(10)
    await turns()
    assert not submits.done()
    desk.take(10)
    await submits
    assert not first.resolved


async def test_jobs_whose_caller_leaves_or_of_which_one_fails_leave_the_queue(desk) -> None:
    for leaves in (True, False):
        first, second = job(10), job(10)
        submits = asyncio.create_task(desk.admission.submit(first, second))
        await turns()
        if leaves:
            submits.cancel()
        else:
            first.fail(InferenceError("no"))
        with pytest.raises((asyncio.CancelledError, InferenceError)):
            await submits
        assert desk.queue.jobs == []
        assert second.resolved


async def test_the_results_of_one_are_awaited_and_those_of_others_given_up_when_one_fails(desk):
    runs = asyncio.create_task(desk.admission.run(job(4, 4)))
    await turns()
    desk.take()
    await turns()
    assert not runs.done()
    desk.complete()
    assert await runs == [7, 7]
    first, second = job(4), job(4)
    await_both = asyncio.create_task(desk.admission.results(first, second))
    await turns()
    second.fail(InferenceError("no"))
    with pytest.raises(InferenceError):
        await await_both
    assert first.resolved


async def test_the_stages_of_a_request_add_up_to_its_time(desk, ticking) -> None:
    ticking.time = 110.0
    waits, never = job(4), job(4)
    desk.queue.put(waits)
    ticking.time = 113.0
    desk.take()
    ticking.time = 119.0
    desk.complete()
    ticking.time = 120.0
    tokenized = [Stage("tokenize", 102.0, 105.0, "fake")]
    timings = timings_of(100.0, tokenized=tokenized, jobs=[waits, never])
    assert (timings.tokenize, timings.inference, timings.total) == (3, 2, 20)
    assert timings.queue == 15
    assert timings.stages == (
        *tokenized,
        Stage("queue", 110.0, 113.0, "fake"),
        Stage("forward", 113.0, 119.0, "fake", 2.0),
    )
    # Clocks of several forwards overlap: there is no wait below zero.
    assert timings_of(119.0, tokenized=tokenized, jobs=[waits]).queue == 0
