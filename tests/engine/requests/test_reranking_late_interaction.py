"""bge-m3 as its own reranker, against FlagEmbedding's `compute_score` on the same files."""

from dataclasses import replace

import numpy as np
import pytest
from FlagEmbedding import BGEM3FlagModel

from smart_embedder.engine import Engine, FusionWeights, RerankRequest
from smart_embedder.engine.records import Outputs, PartScores, SparseVector, TextEmbedding
from smart_embedder.engine.requests.reranking import score
from smart_embedder.errors import InvalidRequestError
from smart_embedder.models.load import load_models
from smart_embedder.settings import Settings
from tests.engine.fakes import loaded
from tests.engine.test_records_options import FakeM3
from tests.support.texts import varied_texts


@pytest.fixture(scope="module")
def reference(tiny_m3) -> BGEM3FlagModel:
    return BGEM3FlagModel(str(tiny_m3), use_fp16=False, devices="cpu")


def settings(folder) -> Settings:
    return Settings(
        embedding_model=str(folder),
        reranker_model="late-interaction",
        device="cpu",
        dtype="float32",
        max_batch_tokens=300,
    )


@pytest.mark.parametrize("weights", [None, [0.4, 0.2, 0.4], [1.0, 0.0, 0.0], [0.0, 1.0, 3.0]])
async def test_equals_compute_score(tiny_m3, reference: BGEM3FlagModel, weights) -> None:
    query, passages = "hybrid search vector", varied_texts(60)
    expected = reference.compute_score(
        [(query, passage) for passage in passages],
        batch_size=8,
        max_query_length=8192,
        max_passage_length=8192,
        weights_for_different_modes=weights,
    )
    request = RerankRequest(
        query, passages, weights=FusionWeights(*weights) if weights else FusionWeights()
    )
    async with Engine(settings(tiny_m3), load_models) as engine:
        result = await engine.rerank(request)
    fused = expected["colbert+sparse+dense"]
    np.testing.assert_allclose(result.scores, fused, rtol=0, atol=1e-5)
    for kind in ("dense", "sparse", "colbert"):
        parts = [getattr(part, kind) for part in result.parts]
        np.testing.assert_allclose(parts, expected[kind], rtol=0, atol=1e-5)


async def test_truncation_is_reported_for_the_query_and_for_passages(tiny_m3) -> None:
    request = RerankRequest("search " * 9000, ["short", "vector " * 8191])
    async with Engine(settings(tiny_m3), load_models) as engine:
        result = await engine.rerank(request)
    places = [(cut.field, cut.index, cut.original_tokens) for cut in result.truncations]
    assert places == [("query", 0, 9002), ("passages", 1, 8193)]


@pytest.mark.parametrize("weights", [(0, 0, 0), (-1, 1, 1), (float("nan"), 1, 1)])
def test_weights_that_give_no_mean_are_refused(weights) -> None:
    with pytest.raises(InvalidRequestError, match="weights must be at least 0"):
        FusionWeights(*weights)


def test_the_fused_score_is_the_weighted_mean() -> None:
    assert FusionWeights(1, 2, 5).fuse(PartScores(0.8, 0.4, 0.2)) == pytest.approx(2.6 / 8)


@pytest.mark.parametrize("most", [1, 1000])
def test_products_are_made_for_some_query_vectors_at_a_time(monkeypatch, most: int) -> None:
    generator = np.random.default_rng(0)
    query, passage = (generator.normal(size=(n, 16)).astype(np.float32) for n in (70, 90))
    whole = score(TextEmbedding(colbert=query), TextEmbedding(colbert=passage)).colbert
    monkeypatch.setattr("smart_embedder.engine.requests.reranking._MOST_PRODUCTS", most)
    parts = score(TextEmbedding(colbert=query), TextEmbedding(colbert=passage)).colbert
    assert parts == pytest.approx(whole, abs=1e-6)


def sparse_of(**weights: float) -> SparseVector:
    return SparseVector(
        np.array([int(name[1:]) for name in weights]), np.float32([*weights.values()])
    )


def test_each_kind_that_both_have_gives_its_score() -> None:
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


def test_a_kind_that_is_not_made_does_not_count_in_the_mean() -> None:
    weights = FusionWeights(1, 2, 5)
    assert weights.fuse(PartScores(0.8, None, 0.2)) == pytest.approx((0.8 + 1.0) / 6)
    assert weights.fuse(PartScores(None, 0.4, None)) == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("weights", "fits"), [((0, 1, 0), True), ((1, 0, 0), False), ((1, 1, 0), True)]
)
async def test_one_of_the_kinds_that_are_made_must_have_a_weight(weights, fits: bool) -> None:
    model = FakeM3()
    model.kinds = Outputs(sparse=True, colbert=True, states=True)
    request = RerankRequest("qu", ["ab"], weights=FusionWeights(*weights))
    models = replace(loaded(model), late_interaction=True)
    async with Engine(Settings(), lambda _: models) as engine:
        if fits:
            await engine.rerank(request)
        else:
            with pytest.raises(InvalidRequestError, match="one of the weights must be above 0"):
                await engine.rerank(request)
