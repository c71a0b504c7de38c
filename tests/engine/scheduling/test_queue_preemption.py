"""Short jobs run between the parts of a long forward: which, how many, and at whose cost."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from smart_embedder.engine import Engine, RerankRequest
from smart_embedder.engine.devices.limits import ServiceRate
from smart_embedder.engine.records import EmbeddingResult
from smart_embedder.engine.scheduling.batcher import Batch, BatchSlice
from smart_embedder.engine.scheduling.queue import split_short
from smart_embedder.errors import InferenceError, InferenceTimeoutError, OutOfMemoryError
from smart_embedder.settings import Settings
from tests.engine.engines import queued
from tests.engine.fakes import FakeReranker, PartedModel, loaded
from tests.engine.scheduling.test_batcher import job

LONG, SHORT, LESS_SHORT = "l" * 96, "s" * 12, "m" * 13


@pytest.fixture
def model() -> PartedModel:
    """Each of the two parts of a forward waits at the gate; a token counts as a second."""
    made = PartedModel()
    made.held = True
    return made


def engine_of(
    model: PartedModel,
    *,
    reranker: FakeReranker | None = None,
    seconds_per_token: float = 1.0,
    **settings: float,
) -> Engine:
    models = loaded(model, 200, reranker, seconds_per_token)
    return Engine(Settings(**settings), lambda _: models)


def request(
    engine: Engine, *texts: str, client: str = "", urgency: int = 3
) -> "asyncio.Task[EmbeddingResult]":
    return asyncio.create_task(engine.embed(list(texts), client=client, urgency=urgency))


async def hold(engine: Engine, model: PartedModel) -> "asyncio.Task[EmbeddingResult]":
    """A long forward that has begun."""
    task = request(engine, LONG, client="bulk")
    await entered(model)
    return task


async def entered(model: PartedModel) -> None:
    await asyncio.to_thread(model.entered.acquire)


async def preempting(engine: Engine) -> None:
    """Let the loop run until a batch waits to be let in."""
    while not engine._devices._first_thread._preempting:  # noqa: ASYNC110 - turns, not time
        await asyncio.sleep(0)


def let_on(model: PartedModel, parts: int) -> None:
    for _ in range(parts):
        model.gate.release()


def dense(result: EmbeddingResult) -> int:
    return int(result.embeddings[0].dense[0])


def sum_of(text: str) -> int:
    return sum(map(ord, text))


@pytest.mark.parametrize("client", ["bulk", "other"])
async def test_a_short_request_is_answered_between_two_parts_of_a_long_forward(
    model, client
) -> None:
    async with engine_of(model) as engine:
        long = await hold(engine, model)
        short = request(engine, SHORT, client=client)
        await preempting(engine)
        let_on(model, 3)  # The long one's first part, and both of the short one's.
        assert dense(await short) == sum_of(SHORT)
        assert not long.done()
        let_on(model, 1)
        assert dense(await long) == sum_of(LONG)
    assert model.batches == [[96], [12]]


@pytest.mark.parametrize(
    ("text", "urgency"), [(LESS_SHORT, 3), (SHORT, 4)], ids=["of like length", "less urgent"]
)
async def test_any_other_request_waits_for_the_end_of_the_forward(model, text, urgency) -> None:
    async with engine_of(model) as engine:
        long = await hold(engine, model)
        other = request(engine, text, urgency=urgency)
        await queued(engine, len(text))
        let_on(model, 2)
        await long
        let_on(model, 2)
        assert dense(await other) == sum_of(text)


async def test_fast_forwards_of_one_model_do_not_make_those_of_another_seem_short() -> None:
    model, reranker = PartedModel(), FakeReranker()
    async with engine_of(model, reranker=reranker) as engine:
        for _ in range(20):
            await engine.rerank(RerankRequest("q", [LONG]))
        model.held = True
        long = await hold(engine, model)
        short = request(engine, SHORT, client="other")
        await preempting(engine)
        let_on(model, 3)
        assert dense(await short) == sum_of(SHORT)
        let_on(model, 1)
        assert dense(await long) == sum_of(LONG)


async def test_a_forward_that_is_soon_over_is_waited_for(model) -> None:
    async with engine_of(model, seconds_per_token=0.0004) as engine:
        long = await hold(engine, model)
        short = request(engine, SHORT)
        await queued(engine, len(SHORT))
        let_on(model, 4)
        await asyncio.gather(long, short)


async def test_an_idle_device_takes_a_short_request_before_a_busy_one_is_preempted(model) -> None:
    second = PartedModel()
    models = loaded(model, 200, seconds_per_token=1.0)
    models = replace(models, replicas=(loaded(second, 200, seconds_per_token=1.0),))
    async with Engine(Settings(), lambda _: models) as engine:
        long = await hold(engine, model)
        assert dense(await request(engine, SHORT)) == sum_of(SHORT)
        let_on(model, 2)
        await long
    assert (model.batches, second.batches) == ([[96]], [[12]])


async def test_short_requests_that_come_during_another_run_together_after_it(model) -> None:
    async with engine_of(model) as engine:
        long = await hold(engine, model)
        first = request(engine, "a" * 6)
        await preempting(engine)
        later = [request(engine, letter * 3) for letter in "bc"]
        await queued(engine, 6)
        let_on(model, 3)  # Of the long one, and of the first.
        await first
        await preempting(engine)
        let_on(model, 3)
        await asyncio.gather(long, *later)
    # The long one has one place for a short one; these were begun after it.
    assert model.batches == [[96], [6], [3, 3]]


async def test_one_that_is_in_the_same_batch_goes_before_it(model, monkeypatch) -> None:
    # By the forward before, which is let go at once, a token would take no time.
    monkeypatch.setattr(ServiceRate, "observe", lambda *_: None)
    async with engine_of(model) as engine:
        before = request(engine, SHORT)
        await entered(model)
        long, short = request(engine, LONG, client="bulk"), request(engine, SHORT)
        await queued(engine, len(LONG + SHORT))
        let_on(model, 4)
        await before
        assert dense(await short) == sum_of(SHORT)
        assert not long.done()
        let_on(model, 2)
        await long
    assert model.batches == [[12], [12], [96]]


async def test_a_short_request_for_another_model_preempts_too(model) -> None:
    async with engine_of(model, reranker=FakeReranker()) as engine:
        long = await hold(engine, model)
        short = asyncio.create_task(engine.rerank(RerankRequest("q", ["passage"])))
        await preempting(engine)
        let_on(model, 1)
        assert (await short).scores == [7]
        assert not long.done()
        let_on(model, 1)
        await long


@pytest.mark.parametrize(
    ("failure", "error"), [(ValueError(), InferenceError), (MemoryError(), OutOfMemoryError)]
)
async def test_one_that_fails_costs_the_long_one_nothing(model, failure, error) -> None:
    model.failures = [None, failure]
    async with engine_of(model) as engine:
        long = await hold(engine, model)
        short = request(engine, SHORT)
        await preempting(engine)
        let_on(model, 3)
        with pytest.raises(error):
            await short
        assert dense(await long) == sum_of(LONG)


async def test_those_that_fail_use_up_the_time_too(model) -> None:
    model.parts = 3
    model.failures = [None, ValueError()]
    async with engine_of(model, seconds_per_token=0.001) as engine:  # 0.096 seconds in all.
        long = await hold(engine, model)
        failing = request(engine, SHORT)
        await preempting(engine)
        let_on(model, 1)
        await entered(model)
        await asyncio.wait({failing}, timeout=0.2)
        let_on(model, 1)
        with pytest.raises(InferenceError):
            await failing
        late = request(engine, SHORT)
        await queued(engine, len(SHORT))
        let_on(model, 5)
        await asyncio.gather(long, late)
    assert model.batches == [[96], [12], [12]]


async def test_a_thread_that_ends_in_it_is_told_to_both_and_the_next_is_served(model) -> None:
    model.failures = [None, SystemExit()]
    async with engine_of(model) as engine:
        long = await hold(engine, model)
        short = request(engine, SHORT)
        await preempting(engine)
        let_on(model, 2)
        for each in (long, short):
            with pytest.raises(InferenceError, match="device thread ended"):
                await each
        model.held = False
        assert dense(await request(engine, SHORT)) == sum_of(SHORT)


async def test_the_time_limit_of_a_forward_does_not_count_the_wait_to_be_let_in(model) -> None:
    async with engine_of(model, gpu_process_timeout=0.2) as engine:
        long = await hold(engine, model)
        short = request(engine, SHORT)
        await preempting(engine)
        with pytest.raises(InferenceTimeoutError):
            await long
        await asyncio.wait({short}, timeout=0.2)
        let_on(model, 4)
        assert dense(await short) == sum_of(SHORT)


async def test_what_a_forward_took_is_told_without_those_that_preempted_it(model) -> None:
    async with engine_of(model) as engine:
        long = await hold(engine, model)
        short = request(engine, SHORT)
        await preempting(engine)
        let_on(model, 1)
        await entered(model)
        await asyncio.wait({short}, timeout=0.2)
        let_on(model, 3)
        during = (await short).timings.inference
        assert during >= 0.2
        assert (await long).timings.total >= during + (await long).timings.inference


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 90), min_size=1, max_size=6), st.sampled_from("abc")),
        min_size=1,
        max_size=8,
    )
)
# Short jobs of two clients: without that of "b", the rest is less than eight times that of "a".
@example([([8], "b"), ([27], "b"), ([1, 1, 1, 22, 90, 90], "b"), ([30], "a")])
def test_a_batch_is_split_into_its_short_jobs_and_a_rest_that_is_never_empty(requests) -> None:
    jobs = [job(*lengths, client=client) for lengths, client in requests]
    batch = Batch(jobs[0].model, [BatchSlice(each, 0, len(each.sequences)) for each in jobs])
    short, rest = split_short(batch)
    assert rest.slices
    assert sorted(map(id, short.slices + rest.slices)) == sorted(map(id, batch.slices))
    assert 8 * max((part.tokens for part in short.slices), default=0) <= batch.tokens
