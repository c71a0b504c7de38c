"""Which model makes what of a request, what its vectors need, and what becomes of them."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from smart_embedder.errors import InvalidRequestError
from smart_embedder.pipelines.embedding import (
    ModelWork,
    assign_models,
    hold_vectors,
    truncations_of,
    vector_bytes,
)
from smart_embedder.requests import AnswerMemory, EmbedRequest, Outputs, Purpose, RerankRequest
from smart_embedder.tokens import TokenizedText
from tests.smart_embedder.engines import busy, engine_for, queued
from tests.smart_embedder.fakes import ALL, FakeM3, FakeModel, FakeQwen, FakeReranker, loaded


@pytest.mark.parametrize(
    ("wanted", "own", "left"),
    [
        (ALL, Outputs(dense=True), Outputs(sparse=True, colbert=True)),
        (Outputs(dense=True), Outputs(dense=True), None),
        (Outputs(sparse=True), None, Outputs(sparse=True)),
        (Outputs(dense=True, colbert=True), Outputs(dense=True), Outputs(colbert=True)),
    ],
)
def test_a_dense_model_of_its_own_makes_dense_vectors_and_the_embedder_the_rest(
    wanted, own, left
) -> None:
    embedder, dense = FakeM3(), FakeQwen()
    embedder.default_prompt, dense.reads_input_type = "own: ", True
    request = EmbedRequest(["a"], wanted, input_type="query")
    tasks = assign_models(replace(loaded(embedder), dense=dense), request, "given: ")
    expected = [(dense, own, "given: ", "query")] if own else []
    expected += [(embedder, left, "own: ", None)] if left else []
    assert [(each.model, each.outputs, each.prompt, each.input_type) for each in tasks] == expected
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
    async with engine_for(model) as engine:
        plain = (await engine.embed(EmbedRequest(["abc"]))).embeddings[0].dense
        request = EmbedRequest(["abc"], normalize_dense=normalize, dimensions=dimensions)
        (made,) = (await engine.embed(request)).embeddings
    expected = plain[:dimensions]
    if normalize if not normalizes else dimensions == 2:
        expected = expected / np.linalg.norm(expected)
    np.testing.assert_allclose(made.dense, expected, rtol=1e-6)


async def test_no_vector_is_divided_by_nothing() -> None:
    class Zero(FakeModel):
        normalizes = False

        def results(self, sequences):
            return [replace(each, dense=each.dense * 0) for each in super().results(sequences)]

    async with engine_for(Zero()) as engine:
        result = await engine.embed(EmbedRequest(["a"], normalize_dense=True))
    assert result.embeddings[0].dense.tolist() == [0]


@pytest.mark.parametrize(
    ("options", "size"),
    [
        # Before they are made: of each text 4 numbers, of each token its id, a weight and a row.
        ({}, 4 * 4 + 2 * (8 + 12 + 4)),
        # And then: 3 numbers, 2 weights, a row, 2 ids, and 3 strings of 16 bytes.
        ({"return_tokens": True}, 3 * 4 + 2 * 12 + 4 + 2 * 8 + 3 * 16),
    ],
)
async def test_what_is_made_counts_with_its_tokens_and_their_strings(options, size) -> None:
    async with engine_for(FakeM3()) as engine:
        await engine.embed(EmbedRequest(["ab"], ALL, **options, answer=AnswerMemory(size)))
        with pytest.raises(InvalidRequestError, match=r"of these (1 texts|2 tokens) need"):
            await engine.embed(EmbedRequest(["ab"], ALL, **options, answer=AnswerMemory(size - 1)))


async def test_a_request_over_two_models_is_answered_and_counted_as_one() -> None:
    async with engine_for(FakeM3(), dense=FakeQwen()) as engine:
        result = await engine.embed(EmbedRequest(["ab", "c"], ALL))
    assert result.tokens == 6
    for each in result.embeddings:
        assert all(vectors is not None for vectors in (each.dense, each.sparse, each.colbert))
    assert {stage.model for stage in result.timings.stages} == {"fake-m3", "fake-qwen"}


def model() -> FakeModel:
    made = FakeModel()
    made.dense_width, made.colbert_width = 100, 10
    return made


@pytest.mark.parametrize(
    ("outputs", "nbytes"),
    [
        (Outputs(), 5 * 8),
        (Outputs(dense=True), 5 * 8 + 2 * 400),
        (Outputs(sparse=True), 5 * (8 + 12)),
        (Outputs(colbert=True), 5 * (8 + 40)),
        (ALL, 5 * (8 + 12 + 40) + 2 * 400),
    ],
)
def test_each_kind_of_vectors_counts_for_each_token_or_text(outputs, nbytes) -> None:
    assert vector_bytes(model(), outputs, [2, 3]) == nbytes


def done(outputs: Outputs, *lengths: int) -> ModelWork:
    """A task that has read texts of so many tokens, of which each had one more."""
    task = ModelWork(model(), outputs, ["a", "b"])
    task.read = [TokenizedText(np.zeros(length, np.int64), length + 1) for length in lengths]
    return task


def test_what_all_models_read_is_held_together_or_refused_with_what_helps() -> None:
    tasks = [done(Outputs(dense=True), 2, 3), done(Outputs(sparse=True), 4, 5)]
    size = 5 * 8 + 800 + 9 * 20
    hold_vectors(tasks, AnswerMemory(size))
    with pytest.raises(InvalidRequestError, match=f"vectors of these 2 texts need {size} bytes"):
        hold_vectors(tasks, AnswerMemory(size - 1))
    tasks.append(done(Outputs(colbert=True), 1, 1))
    told = "of these 16 tokens need .* vector of each token"
    with pytest.raises(InvalidRequestError, match=told):
        hold_vectors(tasks, AnswerMemory(size))
    cuts = truncations_of(tasks[:2], EmbedRequest(["a", "b"]))
    assert [(cut.index, cut.original_tokens) for cut in cuts] == [(0, 3), (1, 4), (0, 5), (1, 6)]


async def test_a_prompt_counts_for_each_text_when_its_cost_is_estimated(monkeypatch) -> None:
    """It is tokenised with each: a long one makes many short texts a huge request."""
    made = model()
    async with engine_for(made) as engine:
        threads, seen = engine._tokenizer_threads, []
        run = threads.run

        async def watched(call, texts, client):
            seen.append((texts, client))
            return await run(call, texts, client)

        monkeypatch.setattr(threads, "run", watched)
        made.default_prompt = "p: "
        await engine.embed(EmbedRequest(["a", "b"], client="me"))
    assert seen == [(["a", "b", "p: ", "p: "], "me")]


async def test_the_client_and_the_class_of_a_request_are_those_of_its_job() -> None:
    made = FakeModel()
    async with engine_for(made, reranker=FakeReranker()) as engine:
        async with busy(engine, made):
            embedded = engine.embed(EmbedRequest(["a"], client="me"))
            scored = engine.rerank(RerankRequest("q", ["b"], is_bulk=True, client="you"))
            tasks = [asyncio.create_task(each) for each in (embedded, scored)]
            await queued(engine, tokens=1 + 2)
            jobs = {each.client: (each.is_bulk, each.purpose) for each in engine._queue.jobs}
        await asyncio.gather(*tasks)
    assert jobs == {"me": (False, Purpose.EMBEDDING), "you": (True, Purpose.RERANKING)}
