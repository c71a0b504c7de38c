"""The engine without HTTP: results, batches, models and timings."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from smart_embedder.engine import Engine
from smart_embedder.engine.records import (
    AnswerMemory,
    EmbedRequest,
    Outputs,
    SparseVector,
    TextEmbedding,
)
from smart_embedder.engine.requests.reranking import ClassificationRequest
from smart_embedder.errors import (
    EmptyInputError,
    InvalidRequestError,
)
from smart_embedder.models.load import load_models
from smart_embedder.observability.metrics import Metrics
from smart_embedder.settings import Settings
from tests.engine.engines import engine_for, hold, let_go, queued
from tests.engine.fakes import ALL, FakeModel, loaded


async def test_results_come_back_in_the_order_of_the_texts() -> None:
    async with engine_for(FakeModel()) as engine:
        result = await engine.embed(EmbedRequest(["abc", "z", "", "aaaaaaaaaaaa", "b"]))
    sums = [float(embedding.dense[0]) for embedding in result.embeddings]
    assert sums == [294, 122, 0, 97 * 12, 98]
    assert result.tokens == 17


async def test_a_request_over_the_budget_is_spread_over_forwards() -> None:
    model = FakeModel()
    async with engine_for(model) as engine:
        await engine.embed(EmbedRequest(["aaaa"] * 5))
    assert model.batches == [[4, 4], [4, 4], [4]]


async def test_requests_that_share_a_forward_each_ask_for_their_own_kinds() -> None:
    model, metrics = FakeModel(), Metrics()
    async with engine_for(model, metrics) as engine:
        held = await hold(engine, model)
        one = asyncio.create_task(engine.embed(EmbedRequest(["ab"])))
        two = asyncio.create_task(engine.embed(EmbedRequest(["cd"], Outputs(sparse=True))))
        await queued(engine, tokens=4)
        let_go(model)
        await asyncio.gather(held, one, two)
    assert model.batches[1:] == [[2, 2]]
    assert model.outputs[1] == [Outputs(dense=True), Outputs(sparse=True)]


async def test_an_idle_device_starts_at_once_with_what_is_there() -> None:
    model = FakeModel()
    async with engine_for(model) as engine:
        await engine.embed(EmbedRequest(["a"]))
        await engine.embed(EmbedRequest(["b"]))
    assert model.batches == [[1], [1]]


async def test_truncation_is_reported_with_exact_counts() -> None:
    async with engine_for(FakeModel()) as engine:
        result = await engine.embed(EmbedRequest(["a", "b" * 130]))
    (truncation,) = result.truncations
    assert (truncation.index, truncation.model) == (1, "fake")
    assert (truncation.max_tokens, truncation.original_tokens) == (100, 130)
    assert truncation.truncated_tokens == 30


async def test_no_texts_is_an_error() -> None:
    async with engine_for(FakeModel()) as engine:
        with pytest.raises(EmptyInputError):
            await engine.embed(EmbedRequest([]))
        with pytest.raises(EmptyInputError):
            await engine.classify(ClassificationRequest(inputs=[]))


async def test_a_request_whose_colbert_vectors_would_fill_the_memory_is_refused() -> None:
    model, answer = FakeModel(), AnswerMemory(2**20)
    model.colbert_width = 2**18 // 100 - 10
    async with engine_for(model) as engine:
        await engine.embed(EmbedRequest(["a" * 100], ALL, answer=answer))
        with pytest.raises(InvalidRequestError, match="send fewer texts"):
            await engine.embed(EmbedRequest(["a" * 100, "b"], ALL, answer=answer))
        assert len(model.batches) == 1
        await engine.embed(
            EmbedRequest(["a" * 100, "b"], Outputs(dense=True, sparse=True), answer=answer)
        )


async def test_hidden_states_count_towards_the_same_limit() -> None:
    model, answer = FakeModel(), AnswerMemory(2**20)
    model.states_width = 2**18 // 100 - 10
    async with engine_for(model) as engine:
        await engine.embed(
            EmbedRequest(["a" * 100], Outputs(dense=True, sparse=True, states=True), answer=answer)
        )
        with pytest.raises(InvalidRequestError, match="send fewer texts"):
            await engine.embed(
                EmbedRequest(
                    ["a" * 100, "b"], Outputs(dense=True, sparse=True, states=True), answer=answer
                )
            )
        await engine.embed(
            EmbedRequest(["a" * 100, "b"], Outputs(dense=True, sparse=True), answer=answer)
        )


async def test_weights_beyond_one_for_each_token_count_when_they_are_made() -> None:
    class Expanding(FakeModel):
        def results(self, sequences: list[np.ndarray]) -> list[TextEmbedding]:
            many = SparseVector(np.arange(500), np.ones(500, np.float32))
            return [TextEmbedding(sparse=many) for _ in sequences]

    answer = AnswerMemory(20_000)
    async with engine_for(Expanding()) as engine:
        await engine.embed(EmbedRequest(["a"] * 3, Outputs(sparse=True), answer=answer))
        with pytest.raises(InvalidRequestError, match="these 4 texts need 24032 bytes"):
            await engine.embed(EmbedRequest(["a"] * 4, Outputs(sparse=True), answer=answer))


async def test_a_result_keeps_nothing_alive_of_another_request_in_its_batch() -> None:
    class OneArray(FakeModel):
        def results(self, sequences: list[np.ndarray]) -> list[TextEmbedding]:
            rows = np.ones((len(sequences), 1000), np.float32)
            return [TextEmbedding(dense=row) for row in rows]

    model = OneArray()
    async with engine_for(model) as engine:
        held = await hold(engine, model)
        both = [asyncio.create_task(engine.embed(EmbedRequest([text]))) for text in "ab"]
        await queued(engine, 2)
        let_go(model)
        await held
        for result in await asyncio.gather(*both):
            assert result.embeddings[0].dense.base is None
    assert [len(batch) for batch in model.batches] == [1, 2]


async def test_a_dense_model_of_its_own_gets_only_the_dense_work() -> None:
    embedder, dense = FakeModel(), FakeModel()
    models = replace(loaded(embedder), dense=dense)
    async with Engine(Settings(), loader=lambda _: models) as engine:
        await engine.embed(EmbedRequest(["a"]))
        assert (len(dense.batches), len(embedder.batches)) == (1, 0)
        await engine.embed(EmbedRequest(["a"], Outputs(sparse=True, colbert=True)))
        assert (len(dense.batches), len(embedder.batches)) == (1, 1)
        await engine.embed(EmbedRequest(["a"]))
        assert embedder.outputs[-1] == [Outputs(sparse=True, colbert=True)]
        assert dense.outputs[-1] == [Outputs(dense=True)]
        await engine.embed(EmbedRequest(["a"], Outputs(sparse=True, states=True)))
        assert dense.outputs[-1] == [Outputs(states=True)]
        assert embedder.outputs[-1] == [Outputs(sparse=True)]


async def test_timings_add_up() -> None:
    async with engine_for(FakeModel()) as engine:
        timings = (await engine.embed(EmbedRequest(["abc"] * 20))).timings
    parts = timings.tokenize + timings.queue + timings.inference
    assert parts == pytest.approx(timings.total)
    assert min(timings.tokenize, timings.queue, timings.inference) >= 0


async def test_the_token_budget_does_not_change_a_texts_vectors(tiny_m3) -> None:
    texts = ["search vector", "hybrid", "music physics history " * 9, "", "a b c"] * 4
    results = []
    for budget in (1, 40, 4096):
        settings = Settings(
            embedding_model=str(tiny_m3),
            reranker_model="none",
            device="cpu",
            dtype="float32",
            max_batch_tokens=budget,
        )
        async with Engine(settings, load_models) as engine:
            results.append((await engine.embed(EmbedRequest(texts, ALL))).embeddings)
    for one, other in zip(results[0] * 2, results[1] + results[2], strict=True):
        np.testing.assert_allclose(one.dense, other.dense, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(one.sparse.indices, other.sparse.indices)
        np.testing.assert_allclose(one.sparse.values, other.sparse.values, rtol=0, atol=1e-5)
        np.testing.assert_allclose(one.colbert, other.colbert, rtol=0, atol=1e-5)
