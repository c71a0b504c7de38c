"""What a device works on: when it will be done, and what is counted of its wait and its forward."""

import asyncio

import numpy as np
import pytest

from smart_embedder.engine import clock
from smart_embedder.engine.devices.executor import InFlight, observe_forward, observe_wait
from smart_embedder.engine.records import Outputs
from smart_embedder.engine.scheduling.batcher import Batch, BatchSlice
from smart_embedder.engine.scheduling.job import Job, Purpose
from smart_embedder.observability.metrics import Metrics
from tests.engine.fakes import FakeModel


def batch_of(*purposes: Purpose, start: int = 0, handed_over: bool = False) -> Batch:
    """For each purpose a job with two sequences of three tokens, of which the last are in it."""
    sequences = [np.zeros(3, np.int64)] * 2
    jobs = [Job(FakeModel(), sequences, Outputs(dense=True), purpose=each) for each in purposes]
    for job in jobs:
        job.enqueued_at = 100.0
        job.take(2, 100.25)
    return Batch(jobs[0].model, [BatchSlice(job, start, 2) for job in jobs], handed_over)


@pytest.mark.parametrize(
    ("began", "left"),
    [
        (None, 10.0),  # It waits for the device still.
        (95.0, 5.0),
        (90.5, 0.5),
        (90.0, 5.0),  # Half as long again as it has taken.
        (80.0, 10.0),
    ],
)
def test_the_time_left_is_what_is_expected_of_a_forward(monkeypatch, began, left) -> None:
    forward = InFlight(batch_of(Purpose.EMBEDDING), asyncio.Event(), expected_seconds=10.0)
    for now in [100.0] if began is None else [began - 7, began]:  # Launched, and then computed.
        monkeypatch.setattr(clock, "now", lambda now=now: now)
        if began is not None:
            forward.begin()
    assert forward.first_began == (0.0 if began is None else began - 7)
    monkeypatch.setattr(clock, "now", lambda: 100.0)
    assert forward.seconds_left == pytest.approx(left)


@pytest.mark.parametrize(
    ("start", "handed_over", "waits"), [(0, False, 2), (1, False, 0), (0, True, 0)]
)
def test_a_wait_is_counted_once_for_each_job_when_its_first_sequence_is_taken(
    start: int, handed_over: bool, waits: int
) -> None:
    metrics = Metrics()
    both = Purpose.EMBEDDING, Purpose.RERANKING
    observe_wait(metrics, batch_of(*both, start=start, handed_over=handed_over))
    assert metrics.value("embedder_queue_wait_seconds_count") == waits
    assert metrics.value("embedder_queue_wait_seconds_sum") == 0.25 * waits


@pytest.mark.parametrize(
    ("purposes", "texts", "embedded", "reranked"),
    [
        ([Purpose.EMBEDDING], 2, 1, 0),
        ([Purpose.RERANKING], 0, 0, 1),
        ([Purpose.EMBEDDING, Purpose.RERANKING, Purpose.EMBEDDING], 4, 1, 1),
    ],
)
def test_a_forward_is_counted_for_what_it_was(purposes, texts, embedded, reranked) -> None:
    metrics = Metrics()
    observe_forward(metrics, batch_of(*purposes), 0.5)
    tokens = 6 * len(purposes)
    assert metrics.value("embedder_tokens_processed_total", model="fake") == tokens
    assert metrics.value("embedder_batch_tokens_sum") == tokens
    assert metrics.value("embedding_batch_size_sum") == texts
    assert metrics.value("embedding_batch_size_count") == embedded
    assert metrics.value("embedding_gpu_inference_duration_seconds_sum") == 0.5 * embedded
    assert metrics.value("rerank_inference_duration_seconds_sum") == 0.5 * reranked
