"""The transitions of a job: in any order, every caller gets exactly one outcome."""

import asyncio
import time

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from smart_embedder.errors import (
    InferenceError,
    InferenceTimeoutError,
    OutOfMemoryError,
    UnhealthyError,
)
from smart_embedder.requests import Outputs
from smart_embedder.scheduling.batcher import Batch, BatchLimits
from smart_embedder.scheduling.job import Job, JobState
from smart_embedder.scheduling.queue import JobQueue
from tests.smart_embedder.scheduling.jobs import MODEL, OTHER, job

KINDS = [Outputs(dense=True), Outputs(sparse=True, colbert=True), Outputs(True, True, True)]
ENDS = {JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED}


async def test_an_error_among_the_results_fails_the_job() -> None:
    made = job(1, 1)
    made.take(2, 0.0)
    made.complete(0, ["a", InferenceError("not finite")], 0.1)
    with pytest.raises(InferenceError, match="not finite"):
        await made.result()


async def test_the_caller_gets_the_outcome_but_not_the_cause_of_an_error() -> None:
    cancelled, failed, refused = job(1), job(1), job(1)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled.result()
    await cancelled.wait_until_taken()
    failed.fail(ZeroDivisionError("secret"))
    failed.complete(0, ["late"], 1.0)
    assert (failed.state, failed.inference_seconds) == (JobState.FAILED, 0)
    with pytest.raises(InferenceError, match="^the model failed on this request$") as raised:
        await failed.result()
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    shared = UnhealthyError("gone", retry_after=30)
    refused.fail(shared)
    with pytest.raises(UnhealthyError, match="gone") as raised:
        await refused.wait_until_taken()
    assert raised.value is not shared, "it would collect the tracebacks of all callers"
    assert raised.value.retry_after == 30


async def test_times_of_the_first_batch_and_the_last_result(monkeypatch) -> None:
    made = job(1, 1)
    for moment in (3.0, 4.0):
        made.take(1, moment)
    for moment, start in ((5.0, 1), (8.0, 0)):
        monkeypatch.setattr(time, "perf_counter", lambda moment=moment: moment)
        assert not made.resolved
        made.complete(start, ["a"], 2.0)
    assert made.state is JobState.COMPLETED
    assert (made.first_taken_at, made.last_completed_at, made.inference_seconds) == (3, 8, 4)
    assert await made.result() == ["a", "a"]


def complete(batch: Batch) -> None:
    outputs = [part.job.outputs for part in batch.slices for _ in range(part.count)]
    batch.complete(list(zip(outputs, map(id, batch.sequences), strict=True)), 0.1)


class Lifetimes(RuleBasedStateMachine):
    """Jobs of several clients and models in a queue and in batches; transitions in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = JobQueue()
        self.jobs: list[Job] = []
        self.batches: list[Batch] = []
        self.outcomes: dict[Job, JobState] = {}

    @rule(
        lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
        kind=st.sampled_from(KINDS),
        model=st.sampled_from([MODEL, OTHER]),
        client=st.sampled_from("ab"),
        bulk=st.booleans(),
    )
    def arrive(self, lengths, kind, model, client, bulk) -> None:
        sequences = [np.full(length, len(self.jobs)) for length in lengths]
        made = Job(model, sequences, kind, client=client, is_bulk=bulk)
        self.jobs.append(made)
        self.queue.put(made)

    @rule(tokens=st.integers(1, 20), requests=st.none() | st.integers(1, 2))
    def take(self, tokens, requests) -> None:
        batch = self.queue.take(lambda _: BatchLimits(tokens, max_requests=requests))
        if batch is not None:
            assert batch.tokens <= tokens or len(batch.sequences) == 1
            self.batches.append(batch)

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def finish(self, data) -> None:
        """Complete a batch as a model does, with the outputs that each job asked for."""
        complete(self._some_batch(data))

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def split(self, data) -> None:
        for half in self._some_batch(data).split_in_half():
            rest = half.drop_resolved()
            if rest.slices:
                self.batches.append(rest)

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), error=st.sampled_from([OutOfMemoryError("full"), RuntimeError("x")]))
    def break_down(self, data, error) -> None:
        self._some_batch(data).fail(error)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def time_out(self, data) -> None:
        data.draw(st.sampled_from(self.jobs)).fail(InferenceTimeoutError("too long"))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def leave(self, data) -> None:
        data.draw(st.sampled_from(self.jobs)).cancel()

    @rule()
    def fail_waiting_jobs(self) -> None:
        self.queue.fail(UnhealthyError("the device does not come back"))

    @invariant()
    def an_outcome_never_changes(self) -> None:
        for arrived in self.jobs:
            assert arrived.resolved == (arrived.state in ENDS)
            if arrived.resolved:
                assert self.outcomes.setdefault(arrived, arrived.state) is arrived.state

    @invariant()
    def the_queue_holds_exactly_the_waiting_jobs(self) -> None:
        waiting = [arrived for arrived in self.jobs if arrived.waiting]
        assert list(self.queue._jobs) == waiting
        assert self.queue.waiting_tokens == sum(arrived.waiting_tokens for arrived in waiting)

    def teardown(self) -> None:
        """Complete all batches and check that every job has its own results or an error."""
        self.queue.close(UnhealthyError("the end"))
        for batch in self.batches:
            complete(batch)
        assert self.queue.take(lambda _: BatchLimits(1)) is None
        asyncio.run(self._check_outcomes())

    async def _check_outcomes(self) -> None:
        for arrived in self.jobs:
            if arrived.state is JobState.COMPLETED:
                expected = [(arrived.outputs, id(sequence)) for sequence in arrived.sequences]
                assert await arrived.result() == expected
            else:
                with pytest.raises((asyncio.CancelledError, Exception)):
                    await asyncio.wait_for(arrived.result(), 1)
                assert arrived.state in ENDS

    def _some_batch(self, data) -> Batch:
        return self.batches.pop(data.draw(st.integers(0, len(self.batches) - 1)))


TestLifetimes = Lifetimes.TestCase
TestLifetimes.settings = settings(max_examples=30, stateful_step_count=40)
