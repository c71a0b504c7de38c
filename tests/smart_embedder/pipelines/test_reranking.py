"""Reranking through the engine: scores, late interaction, time limits, memory and weights."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from FlagEmbedding import BGEM3FlagModel
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer

from app.http_metrics import Metrics
from smart_embedder.errors import (
    EmptyInputError,
    InvalidRequestError,
)
from smart_embedder.pipelines import reranking
from smart_embedder.pipelines.reranking import fuse, score
from smart_embedder.requests import (
    AnswerMemory,
    EmbedRequest,
    FusionWeights,
    Outputs,
    RerankRequest,
)
from smart_embedder.results import PartScores, SparseVector, TextEmbedding, rank, sigmoid
from tests.smart_embedder.engines import busy, engine_for, engine_on_cpu, queued
from tests.smart_embedder.fakes import ALL, FakeM3, FakeReranker
from tests.support.encoders import save_family, word_tokenizer
from tests.support.texts import varied_texts


async def test_scores_are_in_the_order_of_the_passages() -> None:
    reranker = FakeReranker()
    async with engine_for(reranker=reranker) as engine:
        result = await engine.rerank(RerankRequest("q", ["ccc", "a", "bb", ""]))
    assert (result.scores, result.ranking, result.parts) == ([3, 1, 2, 0], [0, 2, 1, 3], None)
    assert reranker.batches == [[4, 2, 3, 1]]


async def test_normalize_applies_a_float32_sigmoid_to_logits_without_overflow() -> None:
    reranker = FakeReranker()
    reranker.offset = -2.0
    async with engine_for(reranker=reranker) as engine:
        request = RerankRequest("q", ["", "aa", "a" * 99], normalize=True)
        scores = (await engine.rerank(request)).scores
        reranker.always_normalizes, reranker.temperature = True, 5.0
        always = (await engine.rerank(replace(request, normalize=False))).scores
    logits = np.float64([-2, 0, 97])
    assert scores == np.float32(1 / (1 + np.exp(-logits))).tolist()
    assert always == np.float32(1 / (1 + np.exp(-logits / 5))).tolist()
    assert sigmoid([-1e30, -50.0, 1e30]) == [0.0, np.float32(np.exp(-50.0)), 1.0]


@given(st.lists(st.floats(-40, 40) | st.sampled_from([39.5, 39.5 + 2**-40]), max_size=50))
def test_ranking_is_by_raw_scores_and_only_equal_ones_keep_their_order(raw: list[float]) -> None:
    assert rank(raw) == sorted(range(len(raw)), key=lambda index: -raw[index])


def test_ranking_of_a_million_saturated_logits_has_no_inversion() -> None:
    random = np.random.default_rng(0)
    near = random.uniform(-40, 40, 250_000)
    logits = np.concatenate(
        (np.float32(near), np.nextafter(np.float32(near), np.float32(np.inf)), near,
         np.nextafter(near, np.inf), [40.0])
    )  # fmt: skip
    ranking = rank(logits.tolist())
    assert (np.diff(logits[ranking]) <= 0).all()
    scores = np.array(sigmoid(logits.tolist()), np.float32)[ranking]
    assert (np.diff(scores) <= 0).all()
    # Many differ as logits alone.
    assert (scores == 1).sum() > 100_000


async def test_ranking_is_that_of_logits_whose_sigmoids_are_equal() -> None:
    reranker = FakeReranker()
    reranker.offset = 60.0
    async with engine_for(reranker=reranker) as engine:
        request = RerankRequest("q", ["a", "ccc", "", "bb", "ddd"], normalize=True)
        result = await engine.rerank(request)
    assert set(result.scores) == {1.0}
    assert result.ranking == [1, 4, 3, 0, 2]


async def test_late_interaction_counts_as_reranking_also_beside_embeddings() -> None:
    model, metrics = FakeM3(), Metrics()
    async with engine_for(model, metrics, late_interaction=True) as engine:
        await engine.rerank(RerankRequest("qu", ["ab", "bc"]))
        assert metrics.value("rerank_inference_duration_seconds_count") == 2
        assert metrics.value("embedding_batch_size_count") == 0
        async with busy(engine, model):
            reranked = asyncio.create_task(engine.rerank(RerankRequest("qu", ["ab"])))
            embedded = asyncio.create_task(engine.embed(EmbedRequest(["b", "c"])))
            await queued(engine, tokens=4)
        await asyncio.gather(reranked, embedded)
    assert model.outputs[-2] == [ALL, *[Outputs(dense=True)] * 2]
    assert metrics.value("rerank_inference_duration_seconds_count") == 4
    assert metrics.value("embedding_batch_size_sum") == 3


@pytest.mark.parametrize(
    ("query", "passages", "message"),
    [("q", [], "no passages"), (" \n", ["a"], "the query is blank")],
)
async def test_no_passages_or_a_blank_query_are_refused(query, passages, message) -> None:
    async with engine_for(reranker=FakeReranker()) as engine:
        with pytest.raises(EmptyInputError, match=message):
            await engine.rerank(RerankRequest(query, passages))


async def test_passages_whose_tokens_exceed_the_memory_are_refused() -> None:
    memory = AnswerMemory(8 * (1 + 3 + 2))
    async with engine_for(reranker=FakeReranker()) as engine:
        await engine.rerank(RerankRequest("q", ["aaa", "bb"], answer=memory))
        with pytest.raises(InvalidRequestError, match="these 7 tokens need 56 bytes"):
            await engine.rerank(RerankRequest("q", ["aaa", "bbb"], answer=memory))


@pytest.fixture(scope="module")
def reference(tiny_m3) -> BGEM3FlagModel:
    return BGEM3FlagModel(str(tiny_m3), use_fp16=False, devices="cpu")


@pytest.mark.parametrize("weights", [None, [0.4, 0.2, 0.4]])
async def test_late_interaction_equals_compute_score_of_flag_embedding(
    tiny_m3, reference: BGEM3FlagModel, weights
) -> None:
    query, passages = "hybrid search vector", varied_texts(48)
    expected = reference.compute_score(
        [(query, passage) for passage in passages],
        batch_size=4,
        max_query_length=8192,
        max_passage_length=8192,
        weights_for_different_modes=weights,
    )
    request = RerankRequest(query, passages, weights=FusionWeights(*weights or ()))
    settings = {"reranker_model": "late-interaction", "max_batch_tokens": 300}
    async with engine_on_cpu(tiny_m3, **settings) as engine:
        result = await engine.rerank(request)
    fused = expected["colbert+sparse+dense"]
    np.testing.assert_allclose(result.scores, fused, rtol=0, atol=1e-5)
    for kind in ("dense", "sparse", "colbert"):
        parts = [getattr(part, kind) for part in result.parts]
        np.testing.assert_allclose(parts, expected[kind], rtol=0, atol=1e-5)


@pytest.mark.parametrize("similarity", ["cosine", "dot", None])
async def test_late_interaction_compares_dense_vectors_as_sentence_transformers(
    tmp_path: Path, similarity: str | None
) -> None:
    """The vectors have different lengths, so the cosine and the dot product rank differently."""
    folder, query, passages = tmp_path / "model", "hybrid search vector", varied_texts(12)
    save_family(folder, "bert", word_tokenizer())
    config = {} if similarity is None else {"similarity_fn_name": similarity}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(config))
    model = SentenceTransformer(str(folder), device="cpu")
    expected = model.similarity(model.encode(query), model.encode(passages))[0].numpy()
    async with engine_on_cpu(folder, reranker_model="late-interaction") as engine:
        scores = (await engine.rerank(RerankRequest(query, passages))).scores
    np.testing.assert_allclose(scores, expected, rtol=1e-5)


@pytest.mark.parametrize("weights", [(0, 0, 0), (-1, 1, 1), (float("nan"), 1, 1)])
def test_negative_zero_and_nan_weights_are_refused(weights) -> None:
    with pytest.raises(InvalidRequestError, match="weights must be at least 0"):
        FusionWeights(*weights)


@pytest.mark.parametrize(
    ("parts", "mean"),
    [((0.8, 0.4, 0.2), 2.6 / 8), ((0.8, None, 0.2), 1.8 / 6), ((None, 0.4, None), 0.4)],
)
def test_the_fused_score_is_the_weighted_mean_of_the_present_scores(parts, mean) -> None:
    assert fuse(FusionWeights(1, 2, 5), PartScores(*parts)) == pytest.approx(mean)


@pytest.mark.parametrize(("max_products", "steps"), [(1, 70), (1000, 7), (1 << 20, 1)])
def test_short_jobs_may_preempt_between_steps_of_the_colbert_products(
    monkeypatch, max_products: int, steps: int
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(reranking, "run_preempting_call", lambda: calls.append(1))
    monkeypatch.setattr(reranking, "_MAX_PRODUCTS", max_products)
    generator = np.random.default_rng(0)
    query, passage = (generator.normal(size=(n, 16)).astype(np.float32) for n in (70, 90))
    expected = (query @ passage.T).max(axis=1).mean()
    colbert = score(TextEmbedding(colbert=query), TextEmbedding(colbert=passage)).colbert
    assert colbert == pytest.approx(expected, abs=1e-6)
    assert len(calls) == steps


def sparse_of(**weights: float) -> SparseVector:
    ids = np.array([int(name[1:]) for name in weights])
    return SparseVector(ids, np.float32([*weights.values()]))


def test_a_passage_is_scored_by_each_kind_that_query_and_passage_have() -> None:
    query = TextEmbedding(
        np.float32([1, 2]), sparse_of(_1=2, _5=3, _9=1), np.float32([[1, 0], [0, 1]])
    )
    passage = TextEmbedding(
        np.float32([3, -1]), sparse_of(_2=5, _5=4, _9=0.5), np.float32([[0.5, 0.25], [0.75, 0]])
    )
    assert score(query, passage) == PartScores(dense=1.0, sparse=12.5, colbert=0.5)
    assert score(query, replace(passage, sparse=None)).sparse is None
    assert score(replace(query, colbert=None), passage).colbert is None
    assert score(query, replace(passage, sparse=sparse_of(_3=1))).sparse == 0


@pytest.mark.parametrize(
    ("weights", "is_valid"), [((0, 1, 0), True), ((1, 0, 0), False), ((1, 1, 0), True)]
)
async def test_a_kind_that_the_model_computes_must_have_a_weight(weights, is_valid: bool) -> None:
    model = FakeM3()
    model.kinds = Outputs(sparse=True, colbert=True)
    request = RerankRequest("qu", ["ab"], weights=FusionWeights(*weights))
    async with engine_for(model, late_interaction=True) as engine:
        if is_valid:
            await engine.rerank(request)
        else:
            with pytest.raises(InvalidRequestError, match="one of the weights must be above 0"):
                await engine.rerank(request)
