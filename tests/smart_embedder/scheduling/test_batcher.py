"""Forming batches by budget, fairness and order, and handing their results to jobs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smart_embedder.errors import InferenceError
from smart_embedder.results import TextEmbedding
from smart_embedder.scheduling.batcher import (
    BULK_WEIGHT,
    INTERACTIVE_WEIGHT,
    Batch,
    BatchLimits,
    Node,
    TreePath,
    form_batch,
)
from smart_embedder.scheduling.job import Job
from tests.smart_embedder.fakes import FakeModel
from tests.smart_embedder.scheduling.jobs import OTHER, batch_of, job

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=8)


ROOT = Node(0)
CLASSES = {False: Node(0, INTERACTIVE_WEIGHT), True: Node(1, BULK_WEIGHT)}


def served(*counts: float) -> list[Node]:
    """Nodes of clients or jobs with these counts, in order of arrival."""
    return [Node(order, served=count) for order, count in enumerate(counts)]


def paths(jobs: list[Job], counts: list[Node] | None = None) -> dict[Job, TreePath]:
    """The tree paths of jobs of one client, in order of arrival."""
    clients, nodes = {False: Node(0), True: Node(1)}, counts or served(*[0.0] * len(jobs))
    return {
        job: TreePath(ROOT, CLASSES[job.is_bulk], clients[job.is_bulk], node)
        for job, node in zip(jobs, nodes, strict=True)
    }


def choose(jobs: list[Job], limits: BatchLimits, counts: list[Node] | None = None) -> Batch:
    """The batch that `form_batch` makes of jobs of one client."""
    return form_batch(paths(jobs, counts), lambda _: limits, max_lead=1000)


def taken(batch: Batch, jobs: list[Job]) -> list[tuple[int, int, int]]:
    return [(jobs.index(part.job), part.start, part.stop) for part in batch.slices]


CHOICES = {
    "all jobs that fit": ([job(2, 3), job(4)], [0, 0], 9, [(0, 0, 2), (1, 0, 1)]),
    "a part of a job larger than the budget": ([job(4, 4, 4)], [0], 9, [(0, 0, 2)]),
    "only a sequence longer than the budget": ([job(50), job(1)], [0, 32], 9, [(0, 0, 1)]),
    "the job that was served least": ([job(9), job(9), job(9)], [13, 11, 12], 9, [(1, 0, 1)]),
    "the longest sequence if it is next": ([job(8192), job(5)], [11, 12], 9, [(0, 0, 1)]),
    "equal parts of two long jobs": (
        [job(*[2] * 10), job(*[2] * 10)],
        [0, 0],
        8,
        [(0, 0, 2), (1, 0, 2)],
    ),
    "a shorter job instead of one that does not fit": (
        [job(5), job(8), job(3)],
        [0, 0, 6],
        9,
        [(0, 0, 1), (2, 0, 1)],
    ),
    "only jobs of the model of the next job": (
        [job(2), job(2, model=OTHER), job(2)],
        [5, 0, 5],
        9,
        [(1, 0, 1)],
    ),
    "an interactive job before an earlier bulk job": (
        [job(4, bulk=True), job(4)],
        [0, 0],
        8,
        [(1, 0, 1), (0, 0, 1)],
    ),
}


@pytest.mark.parametrize("case", CHOICES)
def test_a_batch_holds(case: str) -> None:
    jobs, counts, budget, expected = CHOICES[case]
    nodes = served(*counts)
    batch = choose(jobs, BatchLimits(budget), nodes)
    assert taken(batch, jobs) == expected
    assert batch.model is jobs[expected[0][0]].model
    assert taken(choose(jobs, BatchLimits(budget), nodes), jobs) == expected, "it changes nothing"


@pytest.mark.parametrize(("lead", "is_taken"), [(53, True), (54, True), (55, False)])
def test_no_job_gets_more_than_a_forward_ahead_of_one_that_was_passed_over(
    lead: int, is_taken: bool
) -> None:
    """A sequence of 100 tokens does not fit into the rest of a forward of 64."""
    jobs = [job(40), job(100), job(10)]
    batch = form_batch(paths(jobs, served(0, 0, lead)), lambda _: BatchLimits(64), 64)
    assert [part.job for part in batch.slices] == [jobs[0], *([jobs[2]] if is_taken else [])]


def test_limits_of_requests_and_sequences_and_the_sequence_limit_of_a_model() -> None:
    jobs = [job(1, 1), job(1, 1), job(1, 1)]
    assert taken(choose(jobs, BatchLimits(9, max_requests=2)), jobs) == [(0, 0, 2), (1, 0, 2)]
    assert len(choose(jobs, BatchLimits(9, max_sequences=4)).sequences) == 4
    limited = FakeModel()
    limited.max_batch_sequences = 3
    jobs = [job(1, 1, 1, model=limited), job(1, 1, model=limited)]
    assert taken(choose(jobs, BatchLimits(100)), jobs) == [(0, 0, 2), (1, 0, 1)]


@given(
    st.lists(LENGTHS, min_size=1, max_size=6),
    st.integers(1, 4000),
    st.sampled_from([1, 20]),
    st.sampled_from([7, 10_000]),
)
def test_a_batch_is_as_large_as_the_limits_allow_and_no_larger(
    requests, budget, times, sequences
) -> None:
    jobs = [job(*lengths * times) for lengths in requests]
    batch = choose(jobs, BatchLimits(budget, max_sequences=sequences))
    assert batch.tokens <= budget or len(batch.sequences) == 1
    all_sequences = sum(len(job.sequences) for job in jobs)
    assert len(batch.sequences) == min(sequences, all_sequences) or batch.tokens > budget - 30


@pytest.mark.parametrize(
    ("lengths", "sequences", "expected"),
    [
        ([1] * 30, 15, [10, 5]),
        ([1] * 30, 25, [15, 10]),
        ([3] * 30, 4, [3, 1]),  # A fourth would make 12 tokens.
        ([4, 6, 1], 2, [2, 0]),  # Exactly 10.
        ([4, 7, 1], 2, [1, 1]),
        ([20, 1, 1], 2, [1, 1]),  # A longer sequence is a step of its own.
    ],
)
def test_a_step_takes_as_many_sequences_as_fit_into_a_64th_of_the_budget(
    lengths, sequences, expected
) -> None:
    jobs = [job(*lengths), job(*lengths)]
    batch = choose(jobs, BatchLimits(64 * 10, max_sequences=sequences))
    count = {part.job: part.stop - part.start for part in batch.slices}
    assert [count.get(job, 0) for job in jobs] == expected


# Results.


class SharedResults(FakeModel):
    """A model whose results are views of one array, as those of a device are."""

    def launch(self, sequences, outputs):
        self.sequences = [list(ids) for ids in sequences]
        self.outputs.append(list(outputs))
        whole = np.arange(float(len(sequences)), dtype=np.float32)[:, None]
        return lambda: [TextEmbedding(dense=row) for row in whole]


@pytest.mark.parametrize("shared", [False, True])
async def test_results_are_reduced_and_keep_no_results_of_other_jobs_alive(shared: bool) -> None:
    model = SharedResults()
    reduced, plain = job(1, 1, 1, model=model), job(1, model=model)
    reduced.reduce = lambda result: float(result.dense[0]) * 10
    slices = [(reduced, 1, 3), *([(plain, 0, 1)] if shared else [])]
    results = batch_of(*slices).launch(model)()
    assert results[:2] == [0.0, 10.0]
    if shared:
        assert results[2].dense[0] == 2
        assert results[2].dense.base.size == 1, "not a view of the whole batch"
    kept = batch_of((plain, 0, 1)).launch(model)()
    assert kept[0].dense.base is not None, "a batch of one job is not copied"


async def test_an_error_among_the_results_is_not_reduced() -> None:
    class Fails(SharedResults):
        def launch(self, sequences, outputs):
            return lambda: [InferenceError("not finite"), TextEmbedding()]

    failing = job(1, 1, model=Fails())
    failing.reduce = lambda _result: 7
    results = batch_of((failing, 0, 2)).launch(failing.model)()
    assert isinstance(results[0], InferenceError)
    assert results[1] == 7
