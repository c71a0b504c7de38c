"""The engine without HTTP: who waits, who is refused, and who goes first."""

import asyncio

import pytest

from smart_embedder.engine import Engine
from smart_embedder.engine.records import EmbedRequest
from smart_embedder.engine.requests.reranking import RerankRequest
from smart_embedder.errors import (
    LoadingError,
    QueueFullError,
)
from smart_embedder.observability.metrics import Metrics
from smart_embedder.settings import Settings
from tests.engine.engines import engine_for, entered, hold, let_go, queued, waiting
from tests.engine.fakes import FakeModel, FakeReranker, loaded


async def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    model, metrics = FakeModel(), Metrics()
    async with engine_for(model, metrics, max_queue_size=1) as engine:
        held = await hold(engine, model)
        waits = asyncio.create_task(engine.embed(EmbedRequest(["waits"])))
        await waiting(metrics, 1)
        with pytest.raises(QueueFullError) as refused:
            await engine.embed(EmbedRequest(["refused"]))
        assert refused.value.retry_after >= 1
        let_go(model)
        await asyncio.gather(held, waits)
    assert model.batches == [[4], [5]]


async def test_an_urgent_request_goes_before_those_that_wait() -> None:
    model, metrics = FakeModel(), Metrics()
    async with engine_for(model, metrics) as engine:
        held = await hold(engine, model)
        usual = asyncio.create_task(engine.embed(EmbedRequest(["a" * 8])))
        await queued(engine, tokens=8)
        urgent = asyncio.create_task(engine.embed(EmbedRequest(["b" * 9], urgency=0)))
        await queued(engine, tokens=17)
        let_go(model)
        await asyncio.gather(held, usual, urgent)
    assert model.batches[1:] == [[9], [8]]


async def test_a_cancelled_request_leaves_the_queue_and_its_place() -> None:
    model, metrics = FakeModel(), Metrics()
    async with engine_for(model, metrics, max_queue_size=1) as engine:
        held = await hold(engine, model)
        gone = asyncio.create_task(engine.embed(EmbedRequest(["gone"])))
        await waiting(metrics, 1)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        assert metrics.value("embedding_queue_size") == 0
        let_go(model)
        await held
        await engine.embed(EmbedRequest(["next"]))
    assert model.batches == [[4], [4]]


async def test_before_the_models_are_loaded_it_refuses() -> None:
    with pytest.raises(LoadingError):
        await engine_for(FakeModel()).embed(EmbedRequest(["a"]))


async def told(
    *waiting_texts: list[str], tokens_per_second: float = 0.0, seconds_per_token: float = 0.0
) -> int:
    """The Retry-After of a request that finds these waiting, beside a forward of 4 tokens."""
    model, metrics = FakeModel(), Metrics()
    models = loaded(model, seconds_per_token=seconds_per_token)
    settings = Settings(max_queue_size=len(waiting_texts))
    async with Engine(settings, lambda _: models, metrics) as engine:
        # The measured rate is not part of the engine's face.
        engine._devices._workers[0].executor.rate.tokens_per_second = tokens_per_second
        held = await hold(engine, model)
        waits = [asyncio.create_task(engine.embed(EmbedRequest(texts))) for texts in waiting_texts]
        await queued(engine, sum(len(text) for texts in waiting_texts for text in texts))
        with pytest.raises(QueueFullError) as refused:
            await engine.embed(EmbedRequest(["refused"]))
        let_go(model)
        await asyncio.gather(held, *waits)
    assert refused.value.retry_after is not None
    return refused.value.retry_after


async def test_a_refused_caller_is_told_the_time_until_one_place_is_free() -> None:
    # The place is free when the last of the three texts is taken: after 100 of 7 tokens a second.
    assert 15 <= await told(["a" * 50] * 3, tokens_per_second=7.0) < 20
    # The next batch takes the first of the requests, whatever the others take.
    assert await told(*[["a" * 50]] * 9, tokens_per_second=7.0) < 5
    assert await told(["a" * 50] * 9, ["b" * 60] * 2, tokens_per_second=7.0) >= 18


async def test_the_running_forward_is_part_of_the_time_that_is_told() -> None:
    assert 2 <= await told(["waits"], seconds_per_token=3.0) <= 12
    assert await told(["waits"], seconds_per_token=0.001) == 1


async def test_no_one_is_told_to_wait_longer_than_clients_do() -> None:
    assert await told(["waits"], seconds_per_token=1000.0) == 30
    assert await told(["a" * 50] * 50, tokens_per_second=1.0) == 30


@pytest.mark.parametrize("count", [1, 8])
async def test_a_refused_rerank_is_told_the_time_until_another_one_has_its_scores(count) -> None:
    model, reranker = FakeModel(), FakeReranker()
    models = loaded(model, reranker=reranker, seconds_per_token=1.0)
    settings = Settings(rerank_max_queue=count)
    async with Engine(settings, lambda _: models) as engine:
        reranker.held = True
        accepted = [
            asyncio.create_task(engine.rerank(RerankRequest("q", ["a" * 9]))) for _ in range(count)
        ]
        await entered(reranker)
        await queued(engine, 10 * (count - 1))
        with pytest.raises(QueueFullError) as refused:
            await engine.rerank(RerankRequest("q", ["refused"]))
        for _ in range(count):
            let_go(reranker)
        await asyncio.gather(*accepted)
    assert 2 <= refused.value.retry_after <= 10


async def test_a_client_beside_one_that_fills_the_queue_is_never_refused() -> None:
    model, metrics = FakeModel(), Metrics()
    async with engine_for(model, metrics, max_queue_size=4) as engine:
        held = await hold(engine, model)
        alice = [
            asyncio.create_task(engine.embed(EmbedRequest(["a"] * 9, client="a"))) for _ in range(4)
        ]
        await waiting(metrics, 4)
        bob = asyncio.create_task(engine.embed(EmbedRequest(["b"], client="b")))
        with pytest.raises(QueueFullError):
            await alice[-1]
        await queued(engine, tokens=3 * 9 + 1)
        let_go(model)
        await asyncio.gather(held, bob, *alice[:-1])
    # Bob was in the first batch that was formed after he came; alone, if it preempted the held one.
    assert len(model.batches[1]) in {1, 10}
