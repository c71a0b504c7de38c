"""The engine without HTTP: results, batches, who waits, failures and closing."""

import asyncio
import gc
import threading
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
from smart_embedder.engine.requests.reranking import ClassificationRequest, RerankRequest
from smart_embedder.errors import (
    DrainingError,
    EmptyInputError,
    InferenceError,
    InferenceTimeoutError,
    InvalidRequestError,
    LoadingError,
    QueueFullError,
    StartupError,
    UnhealthyError,
)
from smart_embedder.observability.metrics import Metrics
from smart_embedder.settings import Settings
from tests.engine.engines import engine_for, entered, hold, let_go, queued, waiting
from tests.engine.fakes import ALL, FakeModel, FakeReranker, loaded


async def test_no_texts_is_an_error() -> None:
    async with engine_for(FakeModel()) as engine:
        with pytest.raises(EmptyInputError):
            await engine.embed(EmbedRequest([]))
        with pytest.raises(EmptyInputError):
            await engine.classify(ClassificationRequest(inputs=[]))


@pytest.mark.parametrize("kind", ["colbert", "states"])
async def test_vectors_of_each_token_that_would_fill_the_memory_are_refused(kind: str) -> None:
    model, answer = FakeModel(), AnswerMemory(2**20)
    setattr(model, f"{kind}_width", 2**18 // 100 - 10)
    others = Outputs(dense=True, sparse=True)
    wanted = replace(others, **{kind: True})
    async with engine_for(model) as engine:
        await engine.embed(EmbedRequest(["a" * 100], wanted, answer=answer))
        with pytest.raises(InvalidRequestError, match="send fewer texts"):
            await engine.embed(EmbedRequest(["a" * 100, "b"], wanted, answer=answer))
        assert len(model.batches) == 1
        await engine.embed(EmbedRequest(["a" * 100, "b"], others, answer=answer))


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


async def test_before_the_models_are_loaded_it_refuses() -> None:
    with pytest.raises(LoadingError):
        await engine_for(FakeModel()).embed(EmbedRequest(["a"]))


async def told(*waiting_texts: list[str], seconds_per_token: float) -> int:
    """The Retry-After of a request that finds these waiting, beside a forward of 4 tokens."""
    model = FakeModel()
    settings = {"max_queue_size": len(waiting_texts), "seconds_per_token": seconds_per_token}
    async with engine_for(model, **settings) as engine:
        held = await hold(engine, model)
        waits = [asyncio.create_task(engine.embed(EmbedRequest(texts))) for texts in waiting_texts]
        await queued(engine, sum(len(text) for texts in waiting_texts for text in texts))
        with pytest.raises(QueueFullError) as refused:
            await engine.embed(EmbedRequest(["refused"]))
        let_go(model)
        await asyncio.gather(held, *waits)
    assert refused.value.retry_after is not None
    return refused.value.retry_after


async def test_a_refused_caller_is_told_when_to_come_back_which_is_not_later_than_clients_do() -> (
    None
):
    assert await told(["waits"], seconds_per_token=0.001) == 1
    assert 2 <= await told(["waits"], seconds_per_token=3.0) <= 12
    assert await told(["waits"], seconds_per_token=1000.0) == 30


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
        with pytest.raises(QueueFullError, match=f"{count} rerank requests are in work") as refused:
            await engine.rerank(RerankRequest("q", ["refused"]))
        for _ in range(count):
            let_go(reranker)
        await asyncio.gather(*accepted)
    assert 2 <= refused.value.retry_after <= 10


async def test_a_request_whose_first_part_failed_is_not_run_further() -> None:
    model, metrics = FakeModel(), Metrics()
    async with engine_for(model, metrics) as engine:
        model.failures.append(RuntimeError("broken"))
        with pytest.raises(InferenceError):
            await engine.embed(EmbedRequest(["aaaa"] * 9))
        await engine.embed(EmbedRequest(["b"]))
        assert metrics.value("embedding_queue_size") == 0
    assert model.batches == [[4, 4], [1]]


async def test_a_batch_that_does_not_fit_is_halved_with_the_memory_freed_in_between() -> None:
    model, metrics = FakeModel(), Metrics()
    freed: list[int] = []
    models = replace(loaded(model), free_memory=lambda: freed.append(len(model.batches)))
    async with Engine(Settings(), lambda _: models, metrics) as engine:
        model.failures += [MemoryError(), MemoryError()]
        result = await engine.embed(EmbedRequest(["aa", "bb", "cc", "dd", "ee"]))
    assert model.batches == [[2] * 5, [2, 2], [2], [2], [2, 2, 2]]
    assert freed == [1, 2]
    assert metrics.value("embedder_out_of_memory_splits_total") == 2
    assert [int(e.dense[0]) for e in result.embeddings] == [194, 196, 198, 200, 202]


async def test_a_device_that_does_not_come_back_is_a_failure_until_it_does() -> None:
    model = FakeModel()
    async with engine_for(model, gpu_process_timeout=0.02) as engine:
        held = await hold(engine, model)
        with pytest.raises(InferenceTimeoutError):
            await held
        while engine.failure is None:  # noqa: ASYNC110 - the clock must reach twice the limit
            await asyncio.sleep(0.005)
        with pytest.raises(UnhealthyError, match="has not come back"):
            await engine.embed(EmbedRequest(["a"]))
        let_go(model)
        while engine.failure is not None:  # noqa: ASYNC110 - until the thread is back
            await asyncio.sleep(0)
        await engine.embed(EmbedRequest(["a"]))


async def test_a_fault_in_the_consumer_itself_is_a_failure_and_not_a_silence(monkeypatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    engine = engine_for(FakeModel())
    await engine.start()
    monkeypatch.setattr("smart_embedder.engine.scheduling.queue.JobQueue.take", broken)
    # Who waits for it is told, and so is whoever comes later.
    for _ in range(2):
        with pytest.raises(UnhealthyError, match="consumer has ended"):
            await engine.embed(EmbedRequest(["a"]))
    assert engine.failure is not None
    await engine.close()


async def test_a_failure_of_both_models_is_one_error_and_nothing_is_left_behind(caplog) -> None:
    both = embedder, dense = FakeModel(), FakeModel()
    for model in both:
        model.asynchronous = model.held = True
    models = replace(loaded(embedder), dense=dense)
    async with Engine(Settings(), loader=lambda _: models) as engine:
        embedder.failures.append(RuntimeError("one"))
        dense.failures.append(RuntimeError("other"))
        request = asyncio.create_task(engine.embed(EmbedRequest(["a"], ALL)))
        for model in both:  # Else the second is not launched, as nobody waits for it.
            await entered(model)
        for model in both:
            let_go(model)
        with pytest.raises(InferenceError):
            await request
        result = await engine.embed(EmbedRequest(["a"]))
    gc.collect()
    assert result.embeddings[0].dense == np.float32([97])
    assert "never retrieved" not in caplog.text


async def test_a_failed_start_is_remembered() -> None:
    def broken(_: Settings):
        raise StartupError("no such model in /home/me/models")

    engine = Engine(Settings(), loader=broken)
    with pytest.raises(StartupError, match="no such model"):
        await engine.start()
    with pytest.raises(UnhealthyError, match="could not be loaded; the log says") as caught:
        await engine.embed(EmbedRequest(["a"]))
    assert "no such model" in str(caught.value.__cause__)
    assert "/home/me" not in f"{engine.failure} {caught.value}"
    await engine.close()


async def test_aborting_waits_for_no_tokenizer() -> None:
    """Texts that a tokenizer thread has, that wait for it, and that come later."""
    reads, gate = threading.Event(), threading.Event()

    class Slow(FakeModel):
        def tokenize(self, *arguments, **options):
            reads.set()
            assert gate.wait(60)
            return super().tokenize(*arguments, **options)

    model = Slow()
    engine = engine_for(model, shutdown_timeout=0.05, tokenizer_threads=1)
    await engine.start()
    tasks = [asyncio.create_task(engine.embed(EmbedRequest(["text " * 99]))) for _ in range(5)]
    while not reads.is_set():  # noqa: ASYNC110 - turns, not time
        await asyncio.sleep(0)
    await engine.close()
    assert not gate.is_set()
    for task in tasks:
        with pytest.raises(DrainingError):
            await task
    engine.abort()
    assert not model.batches
    gate.set()


async def test_closing_answers_what_was_accepted_and_refuses_the_rest() -> None:
    model, metrics = FakeModel(), Metrics()
    engine = engine_for(model, metrics)
    await engine.start()
    held = await hold(engine, model)
    accepted = [asyncio.create_task(engine.embed(EmbedRequest([f"text {i}"]))) for i in range(5)]
    await waiting(metrics, 5)
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0)
    with pytest.raises(DrainingError):
        await engine.embed(EmbedRequest(["late"]))
    let_go(model)
    await closing
    results = await asyncio.gather(held, *accepted)
    assert len(results) == 6


async def test_closing_waits_for_a_forward_that_nobody_waits_for() -> None:
    model = FakeModel()
    engine = engine_for(model)
    await engine.start()
    held = await hold(engine, model)
    held.cancel()
    closing = asyncio.create_task(engine.close())
    with pytest.raises(asyncio.CancelledError):
        await held
    assert not closing.done()
    let_go(model)
    await closing
    assert "device" not in {thread.name for thread in threading.enumerate()}


async def test_closing_does_not_wait_for_ever_for_a_device_that_is_stuck() -> None:
    model = FakeModel()
    engine = engine_for(model, shutdown_timeout=0.05)
    await engine.start()
    tasks = [await hold(engine, model), asyncio.create_task(engine.embed(EmbedRequest(["a"])))]
    await engine.close()
    for task in tasks:
        with pytest.raises(DrainingError):
            await task
    let_go(model)
