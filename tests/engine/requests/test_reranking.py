"""Reranking through the engine: sharing, limits, and what is told of it."""

import asyncio
import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smart_embedder.engine import Engine, RerankRequest
from smart_embedder.engine.records import (
    AnswerMemory,
    EmbedRequest,
    Outputs,
    SparseVector,
    TextEmbedding,
)
from smart_embedder.engine.requests import reranking
from smart_embedder.engine.requests.reranking import _groups
from smart_embedder.errors import (
    EmptyInputError,
    InferenceError,
    InferenceTimeoutError,
    InvalidRequestError,
    QueueFullError,
    RerankerDisabledError,
)
from smart_embedder.observability.metrics import Metrics
from smart_embedder.settings import Settings
from tests.engine.fakes import FakeModel, FakeReranker, loaded


def engine_for(reranker: FakeReranker | None, metrics: Metrics | None = None, **settings) -> Engine:
    models = loaded(FakeModel(), reranker=reranker)
    return Engine(Settings(**settings), lambda _: models, metrics)


class InteractingModel(FakeModel):
    """Makes all three kinds of vectors, as bge-m3 does."""

    def results(self, sequences: list[np.ndarray]) -> list[TextEmbedding]:
        one = np.ones(1, np.float32)
        sparse = SparseVector(np.zeros(1, np.int64), one)
        return [TextEmbedding(one, sparse, one[None]) for _ in sequences]


def interacting_engine(
    model: InteractingModel, metrics: Metrics | None = None, **settings
) -> Engine:
    models = replace(loaded(model), late_interaction=True)
    return Engine(Settings(**settings), lambda _: models, metrics)


async def entered(reranker: FakeReranker) -> None:
    await asyncio.to_thread(reranker.entered.acquire)


async def test_scores_come_back_in_the_order_of_the_passages() -> None:
    async with engine_for(FakeReranker()) as engine:
        result = await engine.rerank(RerankRequest("q", ["ccc", "a", "bb", ""]))
    assert result.scores == [3, 1, 2, 0]
    assert result.parts is None


async def test_normalising_is_a_float32_sigmoid_that_never_overflows() -> None:
    reranker = FakeReranker()
    reranker.offset = -2.0
    async with engine_for(reranker) as engine:
        request = RerankRequest("q", ["", "aa", "a" * 99], normalize=True)
        scores = (await engine.rerank(request)).scores
    exact = 1 / (1 + np.exp(-np.float64([-2, 0, 97])))
    np.testing.assert_allclose(scores, exact, rtol=1e-6)


async def test_normalising_leaves_probabilities_alone() -> None:
    reranker = FakeReranker()
    reranker.scores_are_logits = False
    async with engine_for(reranker) as engine:
        result = await engine.rerank(RerankRequest("q", ["aaa"], normalize=True))
    assert result.scores == [3]


async def test_passages_of_different_requests_share_a_forward() -> None:
    reranker, metrics = FakeReranker(), Metrics()
    async with engine_for(reranker, metrics) as engine:
        reranker.held = True
        first = asyncio.create_task(engine.rerank(RerankRequest("q", ["a"])))
        await entered(reranker)
        rest = [
            asyncio.create_task(engine.rerank(RerankRequest("q", [text]))) for text in ("bb", "cc")
        ]
        while metrics.value("embedder_tokenize_seconds_count") != 3:  # noqa: ASYNC110 - turns, not time
            await asyncio.sleep(0)
        reranker.held = False
        reranker.gate.release()
        await asyncio.gather(first, *rest)
    assert reranker.batches == [[2], [3, 3]]


async def test_a_small_request_is_not_blocked_by_one_of_a_thousand_passages() -> None:
    """It is answered within two forwards of its arrival, while the large one goes on."""
    reranker, metrics = FakeReranker(), Metrics()
    async with engine_for(reranker, metrics) as engine:
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


async def test_a_blank_query_or_no_passages_is_empty_input() -> None:
    async with engine_for(FakeReranker()) as engine:
        for request in (RerankRequest(" \n", ["a"]), RerankRequest("q", [])):
            with pytest.raises(EmptyInputError):
                await engine.rerank(request)


async def test_switched_off_it_names_the_setting() -> None:
    async with engine_for(None) as engine:
        with pytest.raises(RerankerDisabledError, match="RERANKER_MODEL is none"):
            await engine.rerank(RerankRequest("q", ["a"]))


async def test_more_than_rerank_max_queue_at_once_are_refused() -> None:
    reranker = FakeReranker()
    async with engine_for(reranker, rerank_max_queue=1) as engine:
        reranker.held = True
        first = asyncio.create_task(engine.rerank(RerankRequest("q", ["a"])))
        await entered(reranker)
        with pytest.raises(QueueFullError, match="1 rerank requests are in work"):
            await engine.rerank(RerankRequest("q", ["b"]))
        reranker.held = False
        reranker.gate.release()
        await first


async def test_forwards_over_the_time_limit_are_a_timeout_and_the_device_goes_on() -> None:
    reranker = FakeReranker()
    async with engine_for(reranker, rerank_gpu_timeout=0.5) as engine:
        reranker.held = True
        with pytest.raises(InferenceTimeoutError, match="longer than 0.5 seconds"):
            await engine.rerank(RerankRequest("q", ["a"]))
        reranker.held = False
        reranker.gate.release()
        assert (await engine.rerank(RerankRequest("q", ["b"]))).scores == [1]


async def test_waiting_behind_other_work_is_not_counted_as_inference() -> None:
    reranker, metrics = FakeReranker(), Metrics()
    async with engine_for(reranker, metrics, rerank_gpu_timeout=0.5) as engine:
        reranker.held = True
        first = asyncio.create_task(engine.rerank(RerankRequest("q", ["a"])))
        await entered(reranker)
        second = asyncio.create_task(engine.rerank(RerankRequest("q", ["b"])))
        with pytest.raises(InferenceTimeoutError):
            await first
        # The second has waited as long as the first ran into its limit, and is not out of time.
        assert not second.done()
        reranker.held = False
        reranker.gate.release()
        result = await second
    assert result.scores == [1]
    assert result.timings.queue > result.timings.inference


async def test_late_interaction_has_one_time_limit_for_all_its_forwards() -> None:
    model = InteractingModel()
    async with interacting_engine(model, rerank_gpu_timeout=0.4) as engine:
        model.held = True
        request = asyncio.create_task(engine.rerank(RerankRequest("q", ["a", "b"])))
        for _ in range(2):  # 0.3 seconds for each of the two forwards
            begun = asyncio.create_task(asyncio.to_thread(model.entered.acquire))
            await asyncio.wait({request, begun}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({request}, timeout=0.3)
            model.gate.release()
        with pytest.raises(InferenceTimeoutError, match="longer than 0.4 seconds"):
            await request
        model.held = False
        model.gate.release()
        model.entered.release()


async def test_late_interaction_counts_as_reranking_also_beside_embeddings() -> None:
    model, metrics = InteractingModel(), Metrics()
    async with interacting_engine(model, metrics) as engine:
        await engine.rerank(RerankRequest("q", ["a", "b"]))
        assert metrics.value("rerank_inference_duration_seconds_count") == 2
        assert metrics.value("embedding_batch_size_count") == 0
        model.held = True
        first = asyncio.create_task(engine.embed(EmbedRequest(["held"])))
        for _ in range(3):
            await asyncio.to_thread(model.entered.acquire)
        beside = [
            asyncio.create_task(engine.rerank(RerankRequest("q", ["a"]))),
            asyncio.create_task(engine.embed(EmbedRequest(["b", "c"]))),
        ]
        while engine._queue.waiting_tokens < 3:  # noqa: ASYNC110 - turns, not time
            await asyncio.sleep(0)
        model.held = False
        model.gate.release()
        await asyncio.gather(first, *beside)
    assert model.outputs[-2] == [Outputs(True, True, True), *[Outputs(dense=True)] * 2]
    assert metrics.value("rerank_inference_duration_seconds_count") == 4
    assert metrics.value("embedding_batch_size_sum") == 3


async def test_pairs_of_their_own_queries_share_a_forward_and_keep_their_order() -> None:
    reranker = FakeReranker()
    async with engine_for(reranker) as engine:
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
    async with interacting_engine(model) as engine:
        queries, passages = ["\x02", "\x03", "\x02"], ["\x05", "\x07", "\x0b"]
        result = await engine.rerank(RerankRequest(queries, passages))
    assert [part.dense for part in result.parts or []] == [10, 21, 22]
    assert model.batches == [[1, 1], [1, 1, 1]]


@pytest.mark.parametrize("query", [[], ["q"], ["q", "r", "s"]])
async def test_other_than_a_query_for_each_passage_is_refused(query) -> None:
    async with engine_for(FakeReranker()) as engine:
        with pytest.raises(InvalidRequestError, match="one for each passage"):
            await engine.rerank(RerankRequest(query, ["a", "b"]))
        with pytest.raises(EmptyInputError):
            await engine.rerank(RerankRequest(["q", " "], ["a", "b"]))


async def test_where_one_forward_of_pairs_fails_none_of_the_others_runs_on() -> None:
    reranker = FakeReranker()
    reranker.failures = [RuntimeError("broken")]
    async with engine_for(reranker) as engine:
        pairs = RerankRequest([f"q{i}" for i in range(6)], ["abcd"] * 6)
        with pytest.raises(InferenceError):
            await engine.rerank(pairs)
        assert (await engine.rerank(RerankRequest("q", ["a"]))).scores == [1]
    assert reranker.batches == [[5, 5], [2]]


async def test_a_caller_of_pairs_who_leaves_takes_all_of_them_away() -> None:
    reranker = FakeReranker()
    async with engine_for(reranker) as engine:
        reranker.held = True
        pairs = RerankRequest([f"q{i}" for i in range(6)], ["abcd"] * 6)
        leaving = asyncio.create_task(engine.rerank(pairs))
        await entered(reranker)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert engine._queue.waiting_tokens == 0
        reranker.held = False
        reranker.gate.release()
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
    async with interacting_engine(Wide()) as engine:
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
    by_vectors, by_pairs = interacting_engine(InteractingModel()), engine_for(FakeReranker())
    async with by_vectors if interacting else by_pairs as engine:
        together = await engine.rerank(RerankRequest(queries, passages))
        alone = [
            (await engine.rerank(RerankRequest(query, [passage]))).scores[0]
            for query, passage in zip(queries, passages, strict=True)
        ]
    assert together.scores == alone
    assert together.tokens == (16 if interacting else 14)


@pytest.mark.parametrize(
    ("queries", "passages", "error"),
    [
        (["q"], ["a", "b"], InvalidRequestError),
        (["q", "r", "s"], ["a", "b"], InvalidRequestError),
        (["q", " "], ["a", "b"], EmptyInputError),
        ([], [], EmptyInputError),
    ],
)
async def test_there_is_one_query_or_one_for_each_passage_and_none_is_blank(
    queries, passages, error
) -> None:
    async with engine_for(FakeReranker()) as engine:
        with pytest.raises(error):
            await engine.rerank(RerankRequest(queries, passages))


async def test_a_model_that_cannot_score_says_why() -> None:
    reranker = FakeReranker()
    reranker.refusal = "it has three labels"
    async with engine_for(reranker) as engine:
        with pytest.raises(RerankerDisabledError, match="it has three labels"):
            await engine.rerank(RerankRequest("q", ["a"]))


async def test_scores_are_computed_only_where_their_tokens_may_be_held() -> None:
    held = AnswerMemory(8 * (1 + 3 + 2))
    async with engine_for(FakeReranker()) as engine:
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
