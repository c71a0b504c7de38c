"""Reranking and classification through the engine: scores, sharing, limits, and what is told."""

import asyncio
import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
from FlagEmbedding import BGEM3FlagModel
from hypothesis import given
from hypothesis import strategies as st

from smart_embedder.engine import Engine, FusionWeights, RerankRequest
from smart_embedder.engine.records import (
    CUT_AT_END,
    AnswerMemory,
    EmbedRequest,
    Outputs,
    PartScores,
    SparseVector,
    TextEmbedding,
    TokenizedText,
    TruncationOptions,
)
from smart_embedder.engine.requests import reranking
from smart_embedder.engine.requests.reranking import ClassificationRequest, _groups, score
from smart_embedder.errors import (
    EmptyInputError,
    InferenceError,
    InferenceTimeoutError,
    InvalidRequestError,
    QueueFullError,
    RerankerDisabledError,
    TextTooLongError,
)
from smart_embedder.models.load import load_models
from smart_embedder.observability.metrics import Metrics
from smart_embedder.settings import Settings
from tests.engine.engines import engine_for, entered, let_go
from tests.engine.fakes import FakeM3, FakeModel, FakeReranker, loaded
from tests.support.texts import varied_texts


class InteractingModel(FakeModel):
    """Makes all three kinds of vectors, as bge-m3 does."""

    def results(self, sequences: list[np.ndarray]) -> list[TextEmbedding]:
        one = np.ones(1, np.float32)
        sparse = SparseVector(np.zeros(1, np.int64), one)
        return [TextEmbedding(one, sparse, one[None]) for _ in sequences]


async def test_scores_come_back_in_the_order_of_the_passages() -> None:
    async with engine_for(reranker=FakeReranker()) as engine:
        result = await engine.rerank(RerankRequest("q", ["ccc", "a", "bb", ""]))
    assert result.scores == [3, 1, 2, 0]
    assert result.parts is None


async def test_normalising_is_a_float32_sigmoid_that_never_overflows() -> None:
    reranker = FakeReranker()
    reranker.offset = -2.0
    async with engine_for(reranker=reranker) as engine:
        request = RerankRequest("q", ["", "aa", "a" * 99], normalize=True)
        scores = (await engine.rerank(request)).scores
    exact = 1 / (1 + np.exp(-np.float64([-2, 0, 97])))
    np.testing.assert_allclose(scores, exact, rtol=1e-6)


async def test_normalising_leaves_probabilities_alone() -> None:
    reranker = FakeReranker()
    reranker.scores_are_logits = False
    async with engine_for(reranker=reranker) as engine:
        result = await engine.rerank(RerankRequest("q", ["aaa"], normalize=True))
    assert result.scores == [3]


async def test_passages_of_different_requests_share_a_forward() -> None:
    reranker, metrics = FakeReranker(), Metrics()
    async with engine_for(metrics=metrics, reranker=reranker) as engine:
        reranker.held = True
        first = asyncio.create_task(engine.rerank(RerankRequest("q", ["a"])))
        await entered(reranker)
        rest = [
            asyncio.create_task(engine.rerank(RerankRequest("q", [text]))) for text in ("bb", "cc")
        ]
        while metrics.value("embedder_tokenize_seconds_count") != 3:  # noqa: ASYNC110 - turns, not time
            await asyncio.sleep(0)
        let_go(reranker)
        await asyncio.gather(first, *rest)
    assert reranker.batches == [[2], [3, 3]]


async def test_a_small_request_is_not_blocked_by_one_of_a_thousand_passages() -> None:
    """It is answered within two forwards of its arrival, while the large one goes on."""
    reranker, metrics = FakeReranker(), Metrics()
    async with engine_for(metrics=metrics, reranker=reranker) as engine:
        reranker.held = True
        large = asyncio.create_task(engine.rerank(RerankRequest("q", ["abc"] * 1000)))
        await entered(reranker)
        small = asyncio.create_task(engine.rerank(RerankRequest("q", ["z"])))
        # What is left of the large one, and the small one.
        while engine._queue.waiting_tokens % 4 != 2:  # noqa: ASYNC110 - turns, not time
            await asyncio.sleep(0)
        reranker.gate.release()
        await entered(reranker)
        reranker.gate.release()
        await small
        assert not large.done()
        reranker.held = False
        reranker.gate.release(2)
        assert len((await large).scores) == 1000
    assert 2 in reranker.batches[1]


async def test_switched_off_it_names_the_setting() -> None:
    async with engine_for() as engine:
        with pytest.raises(RerankerDisabledError, match="RERANKER_MODEL is none"):
            await engine.rerank(RerankRequest("q", ["a"]))


async def test_more_than_rerank_max_queue_at_once_are_refused() -> None:
    reranker = FakeReranker()
    async with engine_for(reranker=reranker, rerank_max_queue=1) as engine:
        reranker.held = True
        first = asyncio.create_task(engine.rerank(RerankRequest("q", ["a"])))
        await entered(reranker)
        with pytest.raises(QueueFullError, match="1 rerank requests are in work"):
            await engine.rerank(RerankRequest("q", ["b"]))
        let_go(reranker)
        await first


async def test_forwards_over_the_time_limit_are_a_timeout_and_the_device_goes_on() -> None:
    reranker = FakeReranker()
    async with engine_for(reranker=reranker, rerank_gpu_timeout=0.5) as engine:
        reranker.held = True
        with pytest.raises(InferenceTimeoutError, match="longer than 0.5 seconds"):
            await engine.rerank(RerankRequest("q", ["a"]))
        let_go(reranker)
        assert (await engine.rerank(RerankRequest("q", ["b"]))).scores == [1]


async def test_waiting_behind_other_work_is_not_counted_as_inference() -> None:
    reranker, metrics = FakeReranker(), Metrics()
    async with engine_for(metrics=metrics, reranker=reranker, rerank_gpu_timeout=0.5) as engine:
        reranker.held = True
        first = asyncio.create_task(engine.rerank(RerankRequest("q", ["a"])))
        await entered(reranker)
        second = asyncio.create_task(engine.rerank(RerankRequest("q", ["b"])))
        with pytest.raises(InferenceTimeoutError):
            await first
        # The second has waited as long as the first ran into its limit, and is not out of time.
        assert not second.done()
        let_go(reranker)
        result = await second
    assert result.scores == [1]
    assert result.timings.queue > result.timings.inference


async def test_late_interaction_has_one_time_limit_for_all_its_forwards() -> None:
    model = InteractingModel()
    async with engine_for(model, late_interaction=True, rerank_gpu_timeout=0.4) as engine:
        model.held = True
        request = asyncio.create_task(engine.rerank(RerankRequest("q", ["a", "b"])))
        for _ in range(2):  # 0.3 seconds for each of the two forwards
            begun = asyncio.create_task(asyncio.to_thread(model.entered.acquire))
            await asyncio.wait({request, begun}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({request}, timeout=0.3)
            model.gate.release()
        with pytest.raises(InferenceTimeoutError, match="longer than 0.4 seconds"):
            await request
        let_go(model)
        model.entered.release()


async def test_late_interaction_counts_as_reranking_also_beside_embeddings() -> None:
    model, metrics = InteractingModel(), Metrics()
    async with engine_for(model, metrics, late_interaction=True) as engine:
        await engine.rerank(RerankRequest("q", ["a", "b"]))
        assert metrics.value("rerank_inference_duration_seconds_count") == 2
        assert metrics.value("embedding_batch_size_count") == 0
        model.held = True
        first = asyncio.create_task(engine.embed(EmbedRequest(["held"])))
        for _ in range(3):
            await entered(model)
        beside = [
            asyncio.create_task(engine.rerank(RerankRequest("q", ["a"]))),
            asyncio.create_task(engine.embed(EmbedRequest(["b", "c"]))),
        ]
        while engine._queue.waiting_tokens < 3:  # noqa: ASYNC110 - turns, not time
            await asyncio.sleep(0)
        let_go(model)
        await asyncio.gather(first, *beside)
    assert model.outputs[-2] == [Outputs(True, True, True), *[Outputs(dense=True)] * 2]
    assert metrics.value("rerank_inference_duration_seconds_count") == 4
    assert metrics.value("embedding_batch_size_sum") == 3


async def test_pairs_of_their_own_queries_share_a_forward_and_keep_their_order() -> None:
    reranker = FakeReranker()
    async with engine_for(reranker=reranker) as engine:
        queries, passages = ["q", "r", "q", "s"], ["ccc", "a", "bb", ""]
        result = await engine.rerank(RerankRequest(queries, passages))
    assert result.scores == [3, 1, 2, 0]
    assert reranker.batches == [[4, 2, 3, 1]]


class EchoingModel(FakeModel):
    """Its dense and ColBERT vectors are the first character's number."""

    def results(self, sequences: list[np.ndarray]) -> list[TextEmbedding]:
        sparse = SparseVector(np.zeros(1, np.int64), np.zeros(1, np.float32))
        vectors = [np.float32(ids[:1]) for ids in sequences]
        return [TextEmbedding(vector, sparse, vector[None]) for vector in vectors]


async def test_late_interaction_scores_each_passage_with_its_own_query() -> None:
    model = EchoingModel()
    async with engine_for(model, late_interaction=True) as engine:
        queries, passages = ["\x02", "\x03", "\x02"], ["\x05", "\x07", "\x0b"]
        result = await engine.rerank(RerankRequest(queries, passages))
    assert [part.dense for part in result.parts or []] == [10, 21, 22]
    assert model.batches == [[1, 1], [1, 1, 1]]


async def test_where_one_forward_of_pairs_fails_none_of_the_others_runs_on() -> None:
    reranker = FakeReranker()
    reranker.failures = [RuntimeError("broken")]
    async with engine_for(reranker=reranker) as engine:
        pairs = RerankRequest([f"q{i}" for i in range(6)], ["abcd"] * 6)
        with pytest.raises(InferenceError):
            await engine.rerank(pairs)
        assert (await engine.rerank(RerankRequest("q", ["a"]))).scores == [1]
    assert reranker.batches == [[5, 5], [2]]


async def test_a_caller_of_pairs_who_leaves_takes_all_of_them_away() -> None:
    reranker = FakeReranker()
    async with engine_for(reranker=reranker) as engine:
        reranker.held = True
        pairs = RerankRequest([f"q{i}" for i in range(6)], ["abcd"] * 6)
        leaving = asyncio.create_task(engine.rerank(pairs))
        await entered(reranker)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert engine._queue.waiting_tokens == 0
        let_go(reranker)
        assert (await engine.rerank(RerankRequest("q", ["a"]))).scores == [1]
    assert reranker.batches == [[5, 5], [2]]


@pytest.mark.long
async def test_many_queries_are_taken_in_groups_whose_vectors_are_let_go() -> None:
    made: list[weakref.ref[np.ndarray]] = []
    alive: list[int] = []

    class Wide(InteractingModel):
        colbert_width = 250

        def results(self, sequences: list[np.ndarray]) -> list[TextEmbedding]:
            gc.collect()
            alive.append(sum(each() is not None for each in made))
            results = super().results(sequences)
            made.extend(weakref.ref(each.colbert) for each in results)
            return results

    queries, passages = [f"{n}" * 4 for n in range(8)], ["a", "b"] * 4
    request = RerankRequest(queries, passages)
    async with engine_for(Wide(), late_interaction=True) as engine:
        expected = (await engine.rerank(request)).scores
        made.clear()
        alive.clear()
        # Room for two queries of 4 tokens and 1,000 bytes for each.
        limited = replace(request, answer=AnswerMemory(4 * 9000))
        assert (await engine.rerank(limited)).scores == expected
        assert max(alive) <= 4
        with pytest.raises(InvalidRequestError, match="send fewer texts or shorter ones"):
            await engine.rerank(replace(request, answer=AnswerMemory(4000)))


@given(st.lists(st.integers(0, 20), max_size=12), st.integers(1, 30))
def test_groups_of_queries_hold_what_they_may_and_none_could_take_the_next(sizes, most) -> None:
    groups = _groups(sizes, most)
    assert [index for group in groups for index in group] == list(range(len(sizes)))
    held = [sum(sizes[index] for index in group) for group in groups]
    assert all(size <= most or len(group) == 1 for size, group in zip(held, groups, strict=True))
    following = [sizes[group[0]] for group in groups[1:]]
    assert all(size + after > most for size, after in zip(held, following, strict=False))


@pytest.mark.parametrize("interacting", [False, True])
async def test_a_query_for_each_passage_scores_them_as_alone(interacting: bool) -> None:
    """Each distinct query is tokenised once, and counts its tokens once."""
    passages, queries = ["aaa", "b", "cc", "dddd"], ["x", "yy", "x", "zzz"]
    by_vectors, by_pairs = (
        engine_for(InteractingModel(), late_interaction=True),
        engine_for(reranker=FakeReranker()),
    )
    async with by_vectors if interacting else by_pairs as engine:
        together = await engine.rerank(RerankRequest(queries, passages))
        alone = [
            (await engine.rerank(RerankRequest(query, [passage]))).scores[0]
            for query, passage in zip(queries, passages, strict=True)
        ]
    assert together.scores == alone
    assert together.tokens == (16 if interacting else 14)


@pytest.mark.parametrize(
    ("queries", "passages", "error", "message"),
    [
        (["q"], ["a", "b"], InvalidRequestError, "one for each passage"),
        (["q", "r", "s"], ["a", "b"], InvalidRequestError, "one for each passage"),
        ([], ["a", "b"], InvalidRequestError, "one for each passage"),
        (["q", " "], ["a", "b"], EmptyInputError, "the query is blank"),
        ([], [], EmptyInputError, "no passages"),
        ("q", [], EmptyInputError, "no passages"),
        (" \n", ["a"], EmptyInputError, "the query is blank"),
    ],
)
async def test_there_is_one_query_or_one_for_each_passage_and_none_is_blank(
    queries, passages, error, message
) -> None:
    async with engine_for(reranker=FakeReranker()) as engine:
        with pytest.raises(error, match=message):
            await engine.rerank(RerankRequest(queries, passages))


async def test_a_model_that_cannot_score_says_why() -> None:
    reranker = FakeReranker()
    reranker.refusal = "it has three labels"
    async with engine_for(reranker=reranker) as engine:
        with pytest.raises(RerankerDisabledError, match="it has three labels"):
            await engine.rerank(RerankRequest("q", ["a"]))


async def test_scores_are_computed_only_where_their_tokens_may_be_held() -> None:
    held = AnswerMemory(8 * (1 + 3 + 2))
    async with engine_for(reranker=FakeReranker()) as engine:
        await engine.rerank(RerankRequest("q", ["aaa", "bb"], answer=held))
        with pytest.raises(InvalidRequestError, match="these 7 tokens need 56 bytes"):
            await engine.rerank(RerankRequest("q", ["aaa", "bbb"], answer=held))


def test_a_short_job_may_run_between_the_products_of_long_texts(monkeypatch) -> None:
    asked = 0

    def count() -> bool:
        nonlocal asked
        asked += 1
        return False

    monkeypatch.setattr(reranking, "run_preempting_call", count)
    query, passage = (np.ones((length, 2), dtype=np.float32) for length in (5000, 1000))
    assert reranking._colbert_score(query, passage) == 2
    assert asked == 5


class FakeClassifier(FakeReranker):
    """Of a text, its length and that of the second one; reads ten characters of both."""

    labels = ("first", "second")
    special_tokens = ([], [])

    def token_spans(self, text: str):
        raise NotImplementedError

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        raise NotImplementedError

    def tokenize_input(
        self, text: str, other: str | None, truncation: TruncationOptions = CUT_AT_END
    ) -> TokenizedText:
        whole = np.array([1] * len(text) + [2] * len(other or ""), np.int64)
        kept = whole[:10] if truncation.side == "right" else whole[-10:]
        return TokenizedText(kept, len(whole))

    def results(self, sequences: list[np.ndarray]) -> list[np.ndarray]:
        return [np.float32([(ids == 1).sum(), (ids == 2).sum()]) for ids in sequences]


async def classify(*inputs: tuple[str, str | None], reranker=None, **options):
    async with engine_for(reranker=reranker or FakeClassifier(), max_batch_tokens=100) as engine:
        return await engine.classify(ClassificationRequest(inputs=[*inputs], **options))


async def test_each_input_has_its_logits_in_the_order_given_and_tokens_are_counted() -> None:
    reranker = FakeClassifier()
    result = await classify(("aaa", None), ("b", "cc"), reranker=reranker)
    assert [each.tolist() for each in result.logits] == [[3, 0], [1, 2]]
    assert result.labels == ("first", "second")
    assert (result.tokens, result.truncations) == (6, [])
    assert reranker.outputs == [[Outputs(logits=True)] * 2]
    assert result.timings.total >= result.timings.tokenize > 0


async def test_what_was_cut_is_reported_or_refused() -> None:
    inputs = [("a", None), ("b" * 8, "c" * 8)]
    result = await classify(*inputs, truncation=TruncationOptions(side="left"))
    (cut,) = result.truncations
    assert (cut.field, cut.index, cut.max_tokens, cut.original_tokens) == ("inputs", 1, 10, 16)
    assert (cut.side, result.logits[1].tolist()) == ("left", [2, 8])
    with pytest.raises(TextTooLongError, match="the text at index 1 has 16 tokens"):
        await classify(*inputs, truncation=TruncationOptions(truncate=False))


async def test_the_labels_of_all_inputs_count_towards_what_an_answer_may_hold() -> None:
    size = 8 * 6 + 4 * 2 * 2
    await classify(("aaa", None), ("b", "cc"), answer=AnswerMemory(size))
    with pytest.raises(InvalidRequestError, match="the labels of these 2 inputs need 64 bytes"):
        await classify(("aaa", None), ("b", "cc"), answer=AnswerMemory(size - 1))


async def test_a_model_without_labels_is_named_and_so_is_a_missing_one() -> None:
    with pytest.raises(InvalidRequestError, match="fake has no labels"):
        await classify(("a", None), reranker=FakeReranker())
    async with engine_for() as engine:
        with pytest.raises(RerankerDisabledError, match="there is no model with labels here"):
            await engine.classify(ClassificationRequest(inputs=[("a", None)]))


async def test_a_classifier_may_score_passages_too() -> None:
    async with engine_for(reranker=FakeClassifier()) as engine:
        assert len((await engine.rerank(RerankRequest("q", ["a"]))).scores) == 1


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
