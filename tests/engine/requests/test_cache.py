"""The embedding cache: what is computed, found and kept, and who waits for whom."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from smart_embedder.engine.requests.shared_cache import CachedVectors

from smart_embedder.engine.records import (
    CUT_AT_END,
    EmbedRequest,
    Outputs,
    SparseVector,
    TextEmbedding,
    TruncationOptions,
)
from smart_embedder.engine.requests import cache as vector_cache
from smart_embedder.engine.requests.cache import (
    _MUCH_MORE,
    _SHORT_CHARACTERS,
    CachedPipeline,
    _SharedWork,
    keys_of,
)
from smart_embedder.engine.requests.embedding import Task
from smart_embedder.engine.space import VectorSpace
from smart_embedder.errors import DrainingError, InferenceError, TextTooLongError
from smart_embedder.observability.metrics import Metrics
from smart_embedder.settings import Settings
from tests.engine.engines import busy, engine_for, queued, waiting
from tests.engine.fakes import ALL, FakeModel

KINDS = 3
UNCUT = {"truncation": TruncationOptions(truncate=False)}
FROM_LEFT = {"truncation": TruncationOptions(side="left")}
LONG = "b" * 90 + "a" * 60


def asked(texts: list[str], outputs: Outputs = ALL, **fields: Any) -> EmbedRequest:
    return EmbedRequest(texts, outputs, **fields)


class KindsModel(FakeModel):
    """Makes every kind, and only what is asked for."""

    colbert_width = 2
    dense_width = 1
    normalizes = False

    def results(self, sequences: list[np.ndarray]) -> list[TextEmbedding]:
        return [
            TextEmbedding(
                dense=np.float32([1 + ids.sum()]) if wanted.dense else None,
                sparse=_weights(ids) if wanted.sparse else None,
                colbert=np.float32([(np.cos(i), np.sin(i)) for i in ids[1:]]).reshape(-1, 2)
                if wanted.colbert
                else None,
            )
            for ids, wanted in zip(sequences, self.outputs[-1], strict=True)
        ]


def _weights(ids: np.ndarray) -> SparseVector:
    indices, counts = np.unique(ids, return_counts=True)
    return SparseVector(indices, counts.astype(np.float32))


def cached_engine(model: KindsModel, metrics: Metrics | None = None, **settings):
    return engine_for(model, metrics, embedding_cache="memory", **settings)


def facts(result) -> tuple:
    """Everything of a result but its times."""
    vectors = [
        (
            each.dense.tolist(),
            each.sparse.indices.tolist(),
            each.sparse.values.tolist(),
            each.colbert.tolist(),
        )
        for each in result.embeddings
    ]
    return vectors, result.truncations, result.tokens


def hits(metrics: Metrics, source: str = "memory") -> float:
    return metrics.value("embedder_cache_hits_total", source=source)


async def test_a_text_is_computed_once_and_found_afterwards() -> None:
    model, metrics = KindsModel(), Metrics()
    async with cached_engine(model, metrics) as engine:
        first = await engine.embed(asked(["ab", "abc"]))
        second = await engine.embed(asked(["abc", "ab"]))
    assert model.batches == [[2, 3]]
    assert facts(second)[0] == facts(first)[0][::-1]
    assert second.tokens == first.tokens == 5
    assert hits(metrics) == metrics.value("embedder_cache_misses_total") == 2 * KINDS
    assert second.timings.tokenize == second.timings.inference == 0
    with pytest.raises(ValueError, match="read-only"):
        second.embeddings[0].dense[0] = 1


async def test_nothing_is_kept_unless_the_setting_says_so() -> None:
    model = KindsModel()
    async with engine_for(model) as engine:
        for _ in range(2):
            await engine.embed(asked(["a"]))
    assert model.batches == [[1], [1]]


async def test_a_text_that_several_requests_need_at_once_is_computed_once() -> None:
    model, metrics = KindsModel(), Metrics()
    async with cached_engine(model, metrics) as engine:
        async with busy(engine, model):
            same = [asyncio.create_task(engine.embed(asked(["ab", "c", "ab"]))) for _ in range(10)]
            await queued(engine, tokens=3)
            # They wait for one that has a place in the queue, and take none themselves.
            assert metrics.value("embedding_queue_size") == 1
            other = asyncio.create_task(engine.embed(asked(["ddd", "c"])))
            await queued(engine, tokens=6)
        results = await asyncio.gather(*same)
        assert hits(metrics, "in_flight") == 9 * 2 * KINDS + KINDS
        assert {str(facts(result)) for result in results} == {str(facts(results[0]))}
        assert facts(await other) == facts(await engine.embed(asked(["ddd", "c"])))
        assert not engine._cache._in_flight, "what is done is forgotten"
    assert model.batches == [[4], [2, 1, 3]]


@pytest.mark.parametrize("comes_again", [0, 2])
@pytest.mark.parametrize("stay", [0, 1])
async def test_who_leaves_takes_nothing_from_those_who_wait_for_the_same(
    stay: int, comes_again: int
) -> None:
    """When all have left their work leaves the queue, and who comes then computes by itself."""
    model, metrics = KindsModel(), Metrics()
    async with cached_engine(model, metrics) as engine:
        async with busy(engine, model):
            leave = [asyncio.create_task(engine.embed(asked(["ab"]))) for _ in range(3)]
            stays = [asyncio.create_task(engine.embed(asked(["ab"]))) for _ in range(stay)]
            await queued(engine, tokens=2)
            for each in leave:
                each.cancel()
            stays += [asyncio.create_task(engine.embed(asked(["ab"]))) for _ in range(comes_again)]
            await asyncio.wait(leave)
            assert all(each.cancelled() for each in leave)
            await queued(engine, tokens=2 if stays else 0)
            assert metrics.value("embedding_queue_size") == bool(stays)
        assert [each.tokens for each in await asyncio.gather(*stays)] == [2] * len(stays)
        await engine.embed(asked(["ab"]))
    assert model.batches == [[4], [2]]


async def test_a_failure_is_that_of_one_request_and_is_not_kept() -> None:
    model = KindsModel()
    async with cached_engine(model) as engine:
        model.failures = [None, ValueError("broken"), None]
        async with busy(engine, model):
            fails, waits = (asyncio.create_task(engine.embed(asked(["ab"]))) for _ in range(2))
            await queued(engine, tokens=2)
        with pytest.raises(InferenceError):
            await fails
        assert (await waits).tokens == 2
        await engine.embed(asked(["ab"]))
    assert model.batches == [[4], [2], [2]]


async def test_what_is_found_waits_for_no_place_in_the_queue() -> None:
    model, metrics = KindsModel(), Metrics()
    async with cached_engine(model, metrics, max_queue_size=1) as engine:
        await engine.embed(asked(["known"]))
        async with busy(engine, model):
            waits = asyncio.create_task(engine.embed(asked(["waits"])))
            await waiting(metrics, 1)
            assert (await engine.embed(asked(["known"]))).tokens == 5
        await waits


@pytest.mark.parametrize(
    "texts",
    [["\ud800"], [f"{i} " + "a" * 60_000 for i in range(3)]],
    ids=["half a surrogate pair", "a large body"],
)
async def test_texts_of_any_kind_and_size_are_found(texts: list[str]) -> None:
    model = KindsModel()
    async with cached_engine(model) as engine:
        assert facts(await engine.embed(asked(texts))) == facts(await engine.embed(asked(texts)))
    assert sum(map(len, model.batches)) == len(texts)


TEXTS = st.lists(st.sampled_from(["", "a", "bb", "ccc", "dddd", LONG]), min_size=1, max_size=6)
OPTIONS = st.sampled_from([{}, UNCUT, FROM_LEFT])


@settings(max_examples=30)
@given(st.lists(st.lists(st.tuples(TEXTS, OPTIONS), min_size=1, max_size=4), max_size=4))
async def test_whatever_is_asked_at_once_and_before_each_answer_is_that_of_a_lonely_request(
    waves,
) -> None:
    async def outcome(engine, texts, options):
        try:
            return facts(await engine.embed(asked(texts, **options)))
        except TextTooLongError as error:
            return str(error), error.problems

    async with engine_for(KindsModel()) as lonely, cached_engine(KindsModel()) as engine:
        for wave in waves:
            found = await asyncio.gather(*(outcome(engine, *each) for each in wave))
            assert found == [await outcome(lonely, *each) for each in wave]


async def test_vectors_of_another_model_of_the_same_name_are_other_entries() -> None:
    model = KindsModel()
    async with cached_engine(model) as engine:
        await engine.embed(asked(["ab"]))
        model.spaces = {"dense": VectorSpace("dense", *8 * ["other"])}
        await engine.embed(asked(["ab"]))
    assert model.batches == [[2], [2]]


async def test_requests_that_wait_for_each_other_are_answered_in_a_drain_and_no_later_one() -> None:
    model = KindsModel()
    engine = cached_engine(model)
    await engine.start()
    async with busy(engine, model):
        same = [asyncio.create_task(engine.embed(asked(["ab"]))) for _ in range(3)]
        await queued(engine, tokens=2)
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        with pytest.raises(DrainingError):
            await engine.embed(asked(["ab"]))
    first, *others = await asyncio.gather(*same)
    await closing
    assert [facts(each) for each in others] == [facts(first)] * 2


class Waiting:
    """Places of which only the number of each client's requests is asked."""

    def __init__(self, **requests: int) -> None:
        self._requests = requests

    def held_by(self, client: str) -> int:
        return self._requests.get(client, 0)


def request_of(characters: int, *, urgency: int = 3, client: str = "a") -> tuple[EmbedRequest, int]:
    return EmbedRequest([], urgency=urgency, client=client), characters


@pytest.mark.parametrize(
    ("own", "other", "waiting", "joins"),
    [
        (request_of(10), request_of(10), 1, True),
        # Up to a few sentences, or several times as much, end at about the same time.
        (request_of(10), request_of(_SHORT_CHARACTERS), 1, True),
        (request_of(10), request_of(_SHORT_CHARACTERS + 1), 1, False),
        (request_of(10_000), request_of(_MUCH_MORE * 10_000), 1, True),
        (request_of(10_000), request_of(_MUCH_MORE * 10_000 + 1), 1, False),
        (request_of(10, urgency=3), request_of(10, urgency=2), 1, True),
        (request_of(10, urgency=2), request_of(10, urgency=3), 1, False),
        # Among many requests of another client, its turn may come late.
        (request_of(10), request_of(10, client="b"), 1, True),
        (request_of(10), request_of(10, client="b"), 2, False),
        (request_of(10), request_of(10), 2, True),
    ],
)
async def test_work_is_joined_where_it_ends_no_later_than_its_own_would(
    own, other, waiting, joins
) -> None:
    forwards = cache_of(6000, Waiting(a=waiting, b=waiting))
    never = asyncio.create_task(asyncio.Event().wait())
    work = _SharedWork(*other, ["key"], never)
    forwards._in_flight["key"] = work
    assert (forwards._work_to_join("key", *own) is work) == joins
    assert forwards._work_to_join("another", *own) is None
    async with forwards._used(work):
        pass
    assert never.cancelled()
    assert forwards._work_to_join("key", *own) is None


def cache_of(size: int, waiting: Any = None, metrics: Metrics | None = None) -> CachedPipeline:
    settings = Settings(embedding_cache="memory", embedding_cache_bytes=size)
    return CachedPipeline(None, waiting, settings, metrics or Metrics())  # type: ignore[arg-type]


def entry(nbytes: int = 2000) -> CachedVectors:
    """One that takes so many bytes."""
    ids = np.zeros(0, np.int32)
    return CachedVectors(ids, 0, True, {"dense": np.zeros(nbytes - 1200, np.int8)})


async def test_the_least_recently_used_is_dropped_first_and_the_size_is_told() -> None:
    metrics = Metrics()
    cache = cache_of(6000, metrics=metrics)
    await cache._keep({key: entry() for key in "abc"})
    assert metrics.value("embedder_cache_entries") == 3
    assert metrics.value("embedder_cache_bytes") == 6000
    assert cache._entries.get("a") is not None
    await cache._keep({"d": entry()})
    assert {*cache._entries} == {"a", "c", "d"}
    assert metrics.value("embedder_cache_bytes") == 6000
    await cache.close()


@pytest.mark.parametrize("large", [1, 10**9])
async def test_of_many_at_once_copies_are_kept_of_those_for_which_there_is_room_together(
    large: int, monkeypatch
) -> None:
    monkeypatch.setattr(vector_cache, "_LARGE_BYTES", large)
    cache, given = cache_of(6000), entry(3000)
    await cache._keep({"old": entry()})
    await cache._keep({"a": given, "huge": entry(6001), "b": entry(3000), "c": entry()})
    assert {*cache._entries} == {"a", "b"}
    given.arrays["dense"][0] = 7
    assert cache._entries["a"].arrays["dense"][0] == 0


def test_all_that_vectors_depend_on_is_in_their_key() -> None:
    model, other, joined, coarser = FakeModel(), FakeModel(), FakeModel(), FakeModel()
    for each, weights in {model: "m", other: "n", joined: "mp", coarser: "m"}.items():
        each.spaces = {"dense": VectorSpace("dense", weights, *7 * ["same"])}
    coarser.precision = "int8"
    texts = ["a", "b", "", "\\ud800", "a"]
    task = Task(model, Outputs(dense=True, sparse=True), texts, "p")
    found = [
        keys_of(task, CUT_AT_END),
        keys_of(replace(task, prompt="q"), CUT_AT_END),
        keys_of(replace(task, input_type="query"), CUT_AT_END),
        keys_of(replace(task, model=other), CUT_AT_END),
        keys_of(replace(task, model=joined, prompt=""), CUT_AT_END),
        keys_of(replace(task, model=coarser), CUT_AT_END),
        keys_of(task, TruncationOptions(side="left")),
        keys_of(task, TruncationOptions(max_tokens=7)),
    ]
    assert [[*each] for each in found] == [texts[:4]] * len(found)
    distinct = {key for keys in found for of_text in keys.values() for key in of_text.values()}
    assert len(distinct) == len(found) * 4 * 2
    assert found[0]["a"]["dense"].endswith(":dense")
    # Whether a text may be cut changes no vector of one that is.
    assert keys_of(task, TruncationOptions(truncate=False)) == found[0]
