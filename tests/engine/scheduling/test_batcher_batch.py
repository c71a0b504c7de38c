"""A batch: whose results are whose, however it is cut, and what it tells of its clients."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smart_embedder.engine.records import Outputs, TextEmbedding
from smart_embedder.engine.scheduling.batcher import Batch, BatchSlice
from smart_embedder.engine.scheduling.job import Job, Purpose
from smart_embedder.errors import InferenceError
from tests.engine.fakes import FakeModel
from tests.engine.scheduling.test_queue import job


def batch_of(*slices: tuple[Job, int, int]) -> Batch:
    return Batch(slices[0][0].model, [BatchSlice(*each) for each in slices])


async def test_each_job_gets_the_results_of_its_own_sequences() -> None:
    first, second = job(1, 2, 3), job(4, 5)
    whole = batch_of((first, 1, 3), (second, 0, 2))
    assert [len(ids) for ids in whole.sequences] == [2, 3, 4, 5]
    assert whole.tokens == 14
    whole.complete(["b", "c", "d", "e"], 2.0)
    assert await second.result() == ["d", "e"]
    assert not first.resolved
    batch_of((first, 0, 1)).complete(["a"], 1.0)
    assert await first.result() == ["a", "b", "c"]
    assert (first.inference_seconds, second.inference_seconds) == (3, 2)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_halves_hold_every_sequence_once_the_first_as_many_as_the_second_or_one_less(counts):
    jobs = [job(*range(1, count + 1)) for count in counts]
    whole = batch_of(*((each, 0, len(each.sequences)) for each in jobs))
    first, second = whole.halves()
    assert len(second.sequences) - len(first.sequences) in {0, 1}
    places = [
        (part.job, place)
        for half in (first, second)
        for part in half.slices
        for place in range(part.start, part.stop)
    ]
    assert places == [(each, place) for each in jobs for place in range(len(each.sequences))]
    assert all(part.count for half in (first, second) for part in half.slices)


def test_the_clients_of_a_batch_are_told_by_their_tokens() -> None:
    alice, more, bob = job(5, 5, client="a"), job(7, client="a"), job(3, client="b")
    whole = batch_of((bob, 0, 1), (alice, 0, 2), (more, 0, 1))
    assert whole.client_tokens == {"a": 17, "b": 3}
    assert whole.longest_slices == {"a": 10, "b": 3}
    assert batch_of((more, 0, 1), (alice, 0, 2)).longest_slices == {"a": 10}
    assert Batch(alice.model, []).weight == 0
    urgent = job(1, urgency=2)
    assert batch_of((alice, 0, 1), (urgent, 0, 1), (bob, 0, 1)).weight == 2


def test_sequences_are_counted_by_what_they_are_for() -> None:
    texts, pairs = job(1, 1, 1), job(1, 1, purpose=Purpose.RERANKING)
    whole = batch_of((texts, 1, 3), (pairs, 0, 2), (texts, 0, 1))
    assert (whole.count(Purpose.EMBEDDING), whole.count(Purpose.RERANKING)) == (3, 2)


def test_who_has_left_is_left_out_and_the_rest_fails_together() -> None:
    here, gone = job(1), job(1)
    whole = Batch(here.model, [BatchSlice(each, 0, 1) for each in (gone, here)], handed_over=True)
    gone.cancel()
    assert [each.job for each in whole.unresolved().slices] == [here]
    assert whole.unresolved().handed_over
    whole.fail(InferenceError("no"))
    assert here.resolved


class Shared(FakeModel):
    """Its results are views of one array, as those of a device are."""

    def launch(self, sequences, outputs):
        self.sequences = [list(ids) for ids in sequences]
        self.outputs.append(list(outputs))
        whole = np.arange(float(len(sequences)), dtype=np.float32)[:, None]
        return lambda: [TextEmbedding(dense=row) for row in whole]


@pytest.mark.parametrize("shared", [False, True])
async def test_results_are_reduced_by_their_job_and_keep_no_other_jobs_alive(shared: bool) -> None:
    model, asked = Shared(), list[int]()

    def reduce(index: int, result: TextEmbedding) -> float:
        asked.append(index)
        return float(result.dense[0]) * 10

    reduced, plain = job(1, 1, 1, model=model), job(1, model=model)
    reduced.reduce = reduce
    slices = [(reduced, 1, 3), *([(plain, 0, 1)] if shared else [])]
    results = batch_of(*slices).launch(model)()
    assert results[:2] == [0.0, 10.0]
    assert asked == [1, 2], "the places in the job, not in the batch"
    if shared:
        assert results[2].dense[0] == 2
        assert results[2].dense.base is None
    kept = batch_of((plain, 0, 1)).launch(model)()
    assert kept[0].dense.base is not None, "a batch of one job is not copied"


async def test_an_error_in_place_of_a_result_is_not_reduced() -> None:
    class Fails(Shared):
        def launch(self, sequences, outputs):
            return lambda: [InferenceError("not finite"), TextEmbedding()]

    failing = job(1, 1, model=Fails())
    failing.reduce = lambda _index, _result: 7
    results = batch_of((failing, 0, 2)).launch(failing.model)()
    assert isinstance(results[0], InferenceError)
    assert results[1] == 7


def test_a_forward_is_asked_for_the_outputs_of_each_sequence() -> None:
    model = Shared()
    dense, sparse = job(1, 1, model=model), job(1, model=model)
    sparse.outputs = Outputs(sparse=True)
    batch_of((dense, 0, 2), (sparse, 0, 1)).launch(model)
    assert model.outputs == [[Outputs(dense=True)] * 2 + [Outputs(sparse=True)]]
