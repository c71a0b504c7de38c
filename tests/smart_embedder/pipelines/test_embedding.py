"""Embedding requests: work for each model, memory of vectors, normalization, jobs."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from smart_embedder.errors import InvalidRequestError
from smart_embedder.pipelines.embedding import (
    ModelWork,
    assign_models,
    find_truncations,
    reserve_vectors,
)
from smart_embedder.requests import AnswerMemory, EmbedRequest, Outputs, Purpose, RerankRequest
from smart_embedder.tokens import TokenizedText
from tests.smart_embedder.engines import busy, engine_for, queued
from tests.smart_embedder.fakes import ALL, FakeM3, FakeModel, FakeQwen, FakeReranker, loaded


@pytest.mark.parametrize(
    ("outputs", "dense_outputs", "other_outputs"),
    [
        (ALL, Outputs(dense=True), Outputs(sparse=True, colbert=True)),
        (Outputs(dense=True), Outputs(dense=True), None),
        (Outputs(sparse=True), None, Outputs(sparse=True)),
        (Outputs(dense=True, colbert=True), Outputs(dense=True), Outputs(colbert=True)),
    ],
)
def test_a_separate_dense_model_computes_dense_vectors_and_the_embedder_the_others(
    outputs, dense_outputs, other_outputs
) -> None:
    embedder, dense = FakeM3(), FakeQwen()
    embedder.default_prompt, dense.reads_input_type = "default: ", True
    request = EmbedRequest(["a"], outputs, input_type="query")
    works = assign_models(replace(loaded(embedder), dense=dense), request, "given: ")
    expected = [(dense, dense_outputs, "given: ", "query")] if dense_outputs else []
    expected += [(embedder, other_outputs, "default: ", None)] if other_outputs else []
    assert [(work.model, work.outputs, work.prompt, work.input_type) for work in works] == expected
    (work,) = assign_models(loaded(embedder), request, "given: ")
    assert (work.model, work.outputs, work.prompt) == (embedder, outputs, "given: ")


@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dimensions", [None, 2, 4])
async def test_vectors_are_normalized_by_the_model_or_by_normalize_dense(
    normalizes, normalize, dimensions
) -> None:
    model = FakeQwen()
    model.normalizes = normalizes
    async with engine_for(model) as engine:
        plain = (await engine.embed(EmbedRequest(["abc"]))).embeddings[0].dense
        request = EmbedRequest(["abc"], normalize_dense=normalize, dimensions=dimensions)
        (embedding,) = (await engine.embed(request)).embeddings
    expected = plain[:dimensions]
    if normalize if not normalizes else dimensions == 2:
        expected = expected / np.linalg.norm(expected)
    np.testing.assert_allclose(embedding.dense, expected, rtol=1e-6)


async def test_normalizing_a_zero_vector_does_not_divide_by_zero() -> None:
    class Zero(FakeModel):
        normalizes = False

        def results(self, sequences):
            results = super().results(sequences)
            return [replace(result, dense=result.dense * 0) for result in results]

    async with engine_for(Zero()) as engine:
        result = await engine.embed(EmbedRequest(["a"], normalize_dense=True))
    assert result.embeddings[0].dense.tolist() == [0]


@pytest.mark.parametrize(
    ("options", "size"),
    [
        # Before the forward: 4 numbers for the text; an id, a weight and a row for each token.
        ({}, 4 * 4 + 2 * (8 + 12 + 4)),
        # Afterwards: 3 numbers, 2 weights, a row, 2 ids, and 3 strings of 16 bytes.
        ({"return_tokens": True}, 3 * 4 + 2 * 12 + 4 + 2 * 8 + 3 * 16),
    ],
)
async def test_memory_is_reserved_for_vectors_token_ids_and_token_strings(options, size) -> None:
    async with engine_for(FakeM3()) as engine:
        await engine.embed(EmbedRequest(["ab"], ALL, **options, answer=AnswerMemory(size)))
        with pytest.raises(InvalidRequestError, match=r"of these (1 texts|2 tokens) need"):
            await engine.embed(EmbedRequest(["ab"], ALL, **options, answer=AnswerMemory(size - 1)))


async def test_the_results_of_two_models_are_merged_into_one() -> None:
    async with engine_for(FakeM3(), dense=FakeQwen()) as engine:
        result = await engine.embed(EmbedRequest(["ab", "c"], ALL))
    assert result.tokens == 6
    for embedding in result.embeddings:
        kinds = (embedding.dense, embedding.sparse, embedding.colbert)
        assert all(vectors is not None for vectors in kinds)
    assert {stage.model for stage in result.timings.stages} == {"fake-m3", "fake-qwen"}


def wide_model() -> FakeModel:
    model = FakeModel()
    model.dense_width, model.colbert_width = 100, 10
    return model


def tokenized(outputs: Outputs, *lengths: int) -> ModelWork:
    """The work of a model that reads texts of these lengths, each cut by one token."""
    work = ModelWork(wide_model(), outputs, ["a", "b"])
    work.read = [TokenizedText(np.zeros(length, np.int64), length + 1) for length in lengths]
    return work


def test_the_vectors_of_all_models_are_reserved_together_or_refused_with_advice() -> None:
    works = [tokenized(Outputs(dense=True), 2, 3), tokenized(Outputs(sparse=True), 4, 5)]
    size = 5 * 8 + 800 + 9 * 20
    reserve_vectors(works, AnswerMemory(size))
    with pytest.raises(InvalidRequestError, match=f"vectors of these 2 texts need {size} bytes"):
        reserve_vectors(works, AnswerMemory(size - 1))
    works.append(tokenized(Outputs(colbert=True), 1, 1))
    message = "of these 16 tokens need .* vector of each token"
    with pytest.raises(InvalidRequestError, match=message):
        reserve_vectors(works, AnswerMemory(size))
    truncations = find_truncations(works[:2], EmbedRequest(["a", "b"]))
    found = [(truncation.index, truncation.original_tokens) for truncation in truncations]
    assert found == [(0, 3), (1, 4), (0, 5), (1, 6)]


async def test_a_job_has_the_client_and_the_class_of_its_request() -> None:
    model = FakeModel()
    async with engine_for(model, reranker=FakeReranker()) as engine:
        async with busy(engine, model):
            embedding = asyncio.create_task(engine.embed(EmbedRequest(["a"], client="me")))
            scoring = asyncio.create_task(
                engine.rerank(RerankRequest("q", ["b"], is_bulk=True, client="you"))
            )
            await queued(engine, tokens=1 + 2)
            jobs = {job.client: (job.is_bulk, job.purpose) for job in engine._queue.jobs}
        await asyncio.gather(embedding, scoring)
    assert jobs == {"me": (False, Purpose.EMBEDDING), "you": (True, Purpose.RERANKING)}


async def test_tokens_are_charged_before_they_are_queued_and_may_be_refused() -> None:
    charged: list[int] = []

    def refuse(tokens: int) -> None:
        charged.append(tokens)
        raise InvalidRequestError("no tokens are left")

    async with engine_for(FakeModel(), reranker=FakeReranker()) as engine:
        for charge in (charged.append, refuse):
            for request in (
                EmbedRequest(["abc", "de"], charge=charge),
                RerankRequest("a", ["bc"], charge=charge),
            ):
                work = engine.embed if isinstance(request, EmbedRequest) else engine.rerank
                if charge is refuse:
                    with pytest.raises(InvalidRequestError, match="no tokens are left"):
                        await work(request)
                else:
                    assert (await work(request)).tokens == charged[-1]
    assert charged[:2] == charged[2:]
