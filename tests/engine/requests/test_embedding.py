"""Which model makes what of a request, and what becomes of its vectors."""

from dataclasses import replace

import numpy as np
import pytest

from smart_embedder.engine import Engine
from smart_embedder.engine.records import AnswerMemory, EmbedRequest, Outputs
from smart_embedder.engine.requests.embedding import assign_models
from smart_embedder.errors import InvalidRequestError
from smart_embedder.settings import Settings
from tests.engine.fakes import ALL, FakeModel, loaded
from tests.engine.test_records_options import FakeM3, FakeQwen, engine_with

EVERY = Outputs(dense=True, sparse=True, colbert=True, states=True)


class FakeTyped(FakeQwen):
    """Reads queries and documents differently."""

    reads_input_type = True


@pytest.mark.parametrize(
    ("wanted", "own", "left"),
    [
        (EVERY, Outputs(dense=True, states=True), Outputs(sparse=True, colbert=True)),
        (Outputs(dense=True), Outputs(dense=True), None),
        (Outputs(states=True), Outputs(states=True), None),
        (Outputs(sparse=True), None, Outputs(sparse=True)),
        (Outputs(dense=True, colbert=True), Outputs(dense=True), Outputs(colbert=True)),
    ],
)
def test_a_dense_model_of_its_own_makes_dense_vectors_and_the_embedder_the_rest(
    wanted, own, left
) -> None:
    embedder, dense = FakeM3(), FakeTyped()
    embedder.default_prompt = "own: "
    models = replace(loaded(embedder), dense=dense)
    request = EmbedRequest(["a"], wanted, input_type="query")
    tasks = assign_models(models, request, "given: ")
    expected = [(dense, own, "given: ", "query")] if own else []
    expected += [(embedder, left, "own: ", None)] if left else []
    assert [(each.model, each.outputs, each.prompt, each.input_type) for each in tasks] == expected
    assert all(each.models is models for each in tasks)
    (task,) = assign_models(loaded(embedder), request, "given: ")
    assert (task.model, task.outputs, task.prompt) == (embedder, wanted, "given: ")


@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dimensions", [None, 2, 4])
async def test_vectors_have_unit_length_where_the_model_or_the_request_says_so(
    normalizes, normalize, dimensions
) -> None:
    model = FakeQwen()
    model.normalizes = normalizes
    options = {"dimensions": dimensions}
    async with engine_with(model) as engine:
        plain = (await engine.embed(EmbedRequest(["abc"]))).embeddings[0].dense
        result = await engine.embed(EmbedRequest(["abc"], normalize_dense=normalize, **options))
    vector = result.embeddings[0].dense
    expected = plain[:dimensions]
    if normalize if not normalizes else dimensions == 2:
        expected = expected / np.linalg.norm(expected)
    np.testing.assert_allclose(vector, expected, rtol=1e-6)


async def test_no_vector_is_divided_by_nothing() -> None:
    class Zero(FakeModel):
        normalizes = False

        def results(self, sequences):
            return [replace(each, dense=each.dense * 0) for each in super().results(sequences)]

    async with engine_with(Zero()) as engine:
        result = await engine.embed(EmbedRequest(["a"], normalize_dense=True))
    assert result.embeddings[0].dense.tolist() == [0]


async def test_what_is_made_counts_with_its_tokens_and_their_strings() -> None:
    """Of ab, 3 numbers of 4 bytes, 2 weights of 12, a row of 4, 2 ids of 8, and 3 strings of 16.

    Before they are made, the width of the model is counted, and a row for each token.
    """
    made = 12 + 24 + 4 + 16
    for options, size in (
        ({}, 16 + 24 + 8 + 16),
        ({"return_tokens": True}, made + 16 * 3),
    ):
        async with engine_with(FakeM3()) as engine:
            await engine.embed(EmbedRequest(["ab"], ALL, **options, answer=AnswerMemory(size)))
            with pytest.raises(InvalidRequestError, match=r"of these (1 texts|2 tokens) need"):
                await engine.embed(
                    EmbedRequest(["ab"], ALL, **options, answer=AnswerMemory(size - 1))
                )


async def test_a_request_over_two_models_is_answered_and_counted_as_one() -> None:
    embedder, dense = FakeM3(), FakeQwen()
    async with engine_with(embedder, dense) as engine:
        result = await engine.embed(EmbedRequest(["ab", "c"], ALL, return_tokens=True))
    assert result.tokens == 6
    assert len(result.embeddings) == 2
    assert [each.dense is not None for each in result.embeddings] == [True, True]
    assert result.token_strings[0].sparse == ["a", "b"]
    assert result.token_strings[1].colbert == []
    assert {stage.model for stage in result.timings.stages} == {"fake-m3", "fake-qwen"}


async def test_the_settings_of_a_request_reach_its_job() -> None:
    async with Engine(Settings(), lambda _: loaded(FakeModel())) as engine:
        put = engine._queue.put
        jobs = []
        engine._queue.put = lambda job: (jobs.append(job), put(job))
        await engine.embed(EmbedRequest(["a"], urgency=1, client="me"))
    assert [(each.client, each.weight) for each in jobs] == [("me", 4.0)]
