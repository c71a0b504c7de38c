"""Tokenizing texts on threads and the event loop, submitting jobs, and their timings."""

import asyncio
import os
import threading
from collections.abc import Iterator

import pytest

from app.http_metrics import Metrics
from smart_embedder.errors import InferenceError
from smart_embedder.interrupts import GivenUpError, stop_if_given_up
from smart_embedder.results import Stage
from smart_embedder.scheduling.admission import Abortable, Admission, TokenizerThreads
from smart_embedder.scheduling.batcher import BatchLimits
from smart_embedder.scheduling.job import timings_of
from smart_embedder.scheduling.queue import JobQueue
from tests.smart_embedder.fakes import FakeModel
from tests.smart_embedder.scheduling.jobs import job
from tests.support.skipped_time import run_ready


class AdmissionBench:
    """An admission with its own queue."""

    def __init__(self) -> None:
        self.queue, self.metrics = JobQueue(), Metrics()
        self.threads = TokenizerThreads(1)
        self.admission = Admission(self.queue, self.threads, Abortable(), self.metrics)

    def take(self, budget: int = 100) -> None:
        self.batch = self.queue.take(lambda _: BatchLimits(budget))

    def complete(self) -> None:
        assert self.batch is not None
        self.batch.complete([7] * len(self.batch.sequences), 2.0)


@pytest.fixture
def bench() -> Iterator[AdmissionBench]:
    made = AdmissionBench()
    yield made
    made.threads.close()


async def test_texts_are_tokenized_off_the_loop_and_the_time_is_measured(bench, ticking) -> None:
    def call() -> str:
        ticking.time += 3
        return threading.current_thread().name

    name, stage = await bench.admission.tokenize(FakeModel(), call, USUAL, "client")
    assert name.startswith("tokenizer")
    assert stage == Stage("tokenize", 100, 103, "fake")
    assert bench.metrics.value("embedder_tokenize_seconds_sum") == 3
    assert bench.metrics.value("embedder_tokenize_seconds_count") == 1


async def test_submit_returns_when_the_device_has_taken_all_jobs(bench) -> None:
    first, second = job(10), job(10)
    submits = asyncio.create_task(bench.admission.submit(first, second))
    for is_over in (False, True):
        await run_ready()
        bench.take(10)
        await run_ready()
        assert submits.done() is is_over
    assert not first.resolved
    runs = asyncio.create_task(bench.admission.run(job(4, 4)))
    await run_ready()
    bench.take()
    await run_ready()
    assert not runs.done()
    bench.complete()
    assert await runs == [7, 7]


@pytest.mark.parametrize("stage", ["submit", "results"])
@pytest.mark.parametrize("leaves", [True, False])
async def test_jobs_leave_the_queue_when_the_caller_leaves_or_one_of_them_fails(
    bench, stage: str, leaves: bool
) -> None:
    first, second = job(10), job(10)
    waits = asyncio.create_task(getattr(bench.admission, stage)(first, second))
    await run_ready()
    if leaves:
        waits.cancel()
    else:
        first.fail(InferenceError("no"))
    with pytest.raises((asyncio.CancelledError, InferenceError)):
        await waits
    assert bench.queue.jobs == []
    assert second.resolved


async def test_the_timings_of_a_request_add_up_to_its_total(bench, ticking) -> None:
    ticking.time = 110.0
    waits, never = job(4), job(4)
    bench.queue.put(waits)
    ticking.time = 113.0
    bench.take()
    ticking.time = 119.0
    bench.complete()
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
    # The times of several forwards may overlap, but the wait is never below zero.
    assert timings_of(119.0, tokenized=tokenized, jobs=[waits]).queue == 0


# Tokenizer threads.

# Texts, and whether they run on the thread for huge requests.
TEXTS = {
    "a sentence": (["search vector"], False),
    "many texts": (["search vector"] * 1024, False),
    "a million characters": (["a" * 1_000_000], False),
    "ligatures that NFKC expands to less": (["ﷺ" * 55_555], False),
    "megabytes": (["search " * 200_000], True),
    "a character more than a million": (["a" * 500_000, "a" * 500_001], True),
    "ligatures that NFKC expands to more": (["ﷺ" * 55_556], True),
}


# Too long to be tokenized on the event loop.
USUAL = ["a" * 256]


@pytest.fixture
def threads() -> Iterator[TokenizerThreads]:
    made = TokenizerThreads(1)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("count", "cores", "expected"), [(3, 1, 3), (None, 2, 2), (None, 64, 8), (None, None, 1)]
)
async def test_the_number_of_tokenizer_threads(monkeypatch, count, cores, expected) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    threads, entered, gate = TokenizerThreads(count), threading.Semaphore(0), threading.Event()
    active, most = [], []

    def call() -> None:
        active.append(1)
        most.append(len(active))
        entered.release()
        gate.wait()
        active.pop()

    calls = [asyncio.create_task(threads.run(call, USUAL, "alice")) for _ in range(12)]
    for _ in range(expected):
        await asyncio.to_thread(entered.acquire)
    gate.set()
    await asyncio.gather(*calls)
    threads.close()
    assert max(most) == expected


@pytest.mark.parametrize("name", ["many texts", "megabytes"])
async def test_no_thread_is_started_once_they_are_closed(name: str) -> None:
    threads = TokenizerThreads(1)
    threads.close()
    with pytest.raises(RuntimeError, match="after shutdown"):
        await threads.run(lambda: None, TEXTS[name][0], "alice")


@pytest.mark.parametrize(
    ("texts", "on_loop"), [(["a" * 255], True), (["a" * 256], False), ([""] * 257, False)]
)
async def test_the_shortest_texts_are_tokenized_on_the_loop(threads, texts, on_loop: bool) -> None:
    ran_on = await threads.run(threading.current_thread, texts, "alice")
    assert (ran_on is threading.current_thread()) == on_loop


async def test_one_call_in_each_iteration_runs_on_the_event_loop(threads) -> None:
    for _ in range(2):
        calls = (threads.run(threading.current_thread, ["a"], "alice") for _ in range(3))
        ran_on = await asyncio.gather(*calls)
        assert [thread is threading.current_thread() for thread in ran_on] == [True, False, False]


@pytest.mark.parametrize(("texts", "is_huge"), TEXTS.values(), ids=TEXTS)
async def test_huge_texts_are_tokenized_on_a_separate_thread(
    texts: list[str], is_huge: bool
) -> None:
    threads = TokenizerThreads(2)
    name = await threads.run(lambda: threading.current_thread().name, texts, "alice")
    threads.close()
    assert name.startswith("tokenizer-huge") == is_huge


async def test_a_call_ends_at_its_next_check_after_its_caller_was_cancelled(threads) -> None:
    entered, gate, given_up = threading.Event(), threading.Event(), threading.Event()

    def call() -> None:
        stop_if_given_up()
        entered.set()
        gate.wait()
        try:
            stop_if_given_up()
        except GivenUpError:
            given_up.set()
            raise

    task = asyncio.create_task(threads.run(call, USUAL, "alice"))
    await asyncio.to_thread(entered.wait)
    task.cancel()
    await asyncio.wait({task})
    gate.set()
    assert await asyncio.to_thread(given_up.wait, 60)
    # The thread is free again, and a call whose caller waits is not stopped.
    await threads.run(stop_if_given_up, USUAL, "bob")
