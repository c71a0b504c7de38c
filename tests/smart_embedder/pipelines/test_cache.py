"""The embedding cache: what is computed, found and kept, and under which key."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.http_metrics import Metrics
from smart_embedder.errors import InferenceError, TextTooLongError
from smart_embedder.metrics import EngineMetrics
from smart_embedder.pipelines import cache as vector_cache
from smart_embedder.pipelines.cache import CachedPipeline, Entry, keys_of
from smart_embedder.pipelines.embedding import ModelWork
from smart_embedder.requests import CUT_AT_END, EmbedRequest, Outputs, TruncationOptions
from smart_embedder.results import SparseVector, TextEmbedding
from smart_embedder.tokens import TokenizedText
from smart_embedder.vector_space import VectorSpace
from tests.smart_embedder.engines import busy, engine_for, waiting
from tests.smart_embedder.fakes import ALL, FakeM3, FakeModel

UNCUT = {"truncation": TruncationOptions(truncate=False)}
FROM_LEFT = {"truncation": TruncationOptions(side="left")}
LONG = "b" * 90 + "a" * 60
DENSE, SPARSE = Outputs(dense=True), Outputs(sparse=True)


def asked(texts: list[str], outputs: Outputs = ALL, **fields: Any) -> EmbedRequest:
    return EmbedRequest(texts, outputs, **fields)


def cached_engine(model: FakeM3, metrics: Metrics | None = None, **settings):
    return engine_for(model, metrics, embedding_cache_bytes=2**28, **settings)


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


async def test_a_text_is_computed_once_and_found_afterwards() -> None:
    model, metrics = FakeM3(), Metrics()
    async with cached_engine(model, metrics) as engine:
        first = await engine.embed(asked(["ab", "abc", "ab"]))
        second = await engine.embed(asked(["abc", "ab"]))
        third = await engine.embed(asked(["d", "ab"]))
    assert model.batches == [[2, 3], [1]]
    assert facts(second)[0] == facts(first)[0][1:]
    assert facts(third)[0][1] == facts(first)[0][0]
    assert second.tokens == 5
    assert second.timings.tokenize == second.timings.inference == 0 < third.timings.inference
    assert metrics.value("embedder_cache_hits_total") == 3
    assert metrics.value("embedder_cache_misses_total") == 3
    assert engine.cache.count == 3


async def test_nothing_is_kept_unless_the_setting_says_so() -> None:
    model = FakeM3()
    async with engine_for(model) as engine:
        for _ in range(2):
            await engine.embed(asked(["a"]))
    assert model.batches == [[1], [1]]


async def test_a_text_is_found_if_its_entry_has_all_kinds_that_are_asked_for() -> None:
    model = FakeM3()
    async with cached_engine(model) as engine:
        await engine.embed(asked(["ab"], DENSE))
        await engine.embed(asked(["ab"], SPARSE))
        both = await engine.embed(asked(["ab"], Outputs(dense=True, sparse=True)))
        assert model.batches == [[2], [2]], "its entry has both kinds now"
        everything = await engine.embed(asked(["ab"]))
        (found,) = (await engine.embed(asked(["ab"], SPARSE))).embeddings
    assert model.batches == [[2], [2], [2]]
    assert both.embeddings[0].colbert is None
    assert (found.dense, found.colbert) == (None, None)
    async with engine_for(FakeM3()) as lonely:
        assert facts(await lonely.embed(asked(["ab"]))) == facts(everything)


async def test_each_model_of_a_request_has_entries_of_its_own() -> None:
    model, dense = FakeM3(), FakeM3()
    async with cached_engine(model, dense=dense) as engine:
        first = await engine.embed(asked(["ab"]))
        assert facts(await engine.embed(asked(["ab"]))) == facts(first)
    assert model.batches == dense.batches == [[2]]


async def test_a_failure_is_not_kept() -> None:
    model = FakeM3()
    async with cached_engine(model) as engine:
        model.failures = [ValueError("broken"), None]
        with pytest.raises(InferenceError):
            await engine.embed(asked(["ab"]))
        await engine.embed(asked(["ab"]))
    assert model.batches == [[2], [2]]


async def test_a_text_that_is_found_waits_for_no_place_in_the_queue() -> None:
    model = FakeM3()
    async with cached_engine(model, max_queue_size=1) as engine:
        await engine.embed(asked(["known"]))
        async with busy(engine, model):
            waits = asyncio.create_task(engine.embed(asked(["waits"])))
            await waiting(engine, 1)
            assert (await engine.embed(asked(["known"]))).tokens == 5
        await waits


async def test_texts_of_any_size_are_found() -> None:
    texts = [f"{i} " + "a" * 60_000 for i in range(3)]
    model = FakeM3()
    async with cached_engine(model) as engine:
        assert facts(await engine.embed(asked(texts))) == facts(await engine.embed(asked(texts)))
    assert sum(map(len, model.batches)) == len(texts)


TEXTS = st.lists(st.sampled_from(["", "a", "bb", "ccc", "dddd", LONG]), min_size=1, max_size=6)
OPTIONS = st.sampled_from([{}, UNCUT, FROM_LEFT])


@settings(max_examples=30)
@given(st.lists(st.lists(st.tuples(TEXTS, OPTIONS), min_size=1, max_size=4), max_size=4))
async def test_answers_and_errors_are_those_of_an_engine_without_a_cache(waves) -> None:
    async def outcome(engine, texts, options):
        try:
            return facts(await engine.embed(asked(texts, **options)))
        except TextTooLongError as error:
            return str(error), error.problems

    async with engine_for(FakeM3()) as lonely, cached_engine(FakeM3()) as engine:
        for wave in waves:
            found = await asyncio.gather(*(outcome(engine, *each) for each in wave))
            assert found == [await outcome(lonely, *each) for each in wave]


async def test_vectors_of_another_model_of_the_same_name_are_other_entries() -> None:
    model = FakeM3()
    async with cached_engine(model) as engine:
        await engine.embed(asked(["ab"]))
        model.spaces = {"dense": VectorSpace("dense", *8 * ["other"])}
        await engine.embed(asked(["ab"]))
    assert model.batches == [[2], [2]]


def test_an_entry_is_a_read_only_copy_with_the_same_bits() -> None:
    batch = np.float32([[0.1, 0.2], [1, 0]])
    weights = SparseVector(np.array([1, 9]), np.float32([0.3, 2]))
    made = TextEmbedding(batch[0], weights, batch[1:])
    kept = Entry(TokenizedText(np.array([3, 1, 2]), 5, exact=False), made).copied()
    expected = [array.tobytes() for array in made.arrays if array is not None]
    batch[:] = weights.values[:] = 0
    arrays = [array for array in kept.vectors.arrays if array is not None]
    assert [array.tobytes() for array in arrays] == expected
    for array in (*arrays, kept.read.ids):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7
    assert (kept.read.ids.tolist(), kept.read.original_tokens, kept.read.exact) == (
        [3, 1, 2],
        5,
        False,
    )
    assert kept.nbytes == sum(map(len, expected)) + 24 + 1200


def cache_of(size: int) -> CachedPipeline:
    return CachedPipeline(None, None, size, EngineMetrics())  # type: ignore[arg-type]


def entry(nbytes: int = 2000) -> Entry:
    """One that takes so many bytes."""
    vectors = TextEmbedding(np.zeros(nbytes - 1200, np.int8))
    return Entry(TokenizedText(np.zeros(0, np.int64), 0), vectors)


async def test_the_least_recently_used_is_dropped_first() -> None:
    cache = cache_of(6000)
    await cache._keep({key: entry() for key in "abc"})
    assert (cache.count, cache.nbytes) == (3, 6000)
    assert cache._entries.get("a") is not None
    await cache._keep({"d": entry()})
    assert {*cache._entries} == {"a", "c", "d"}
    assert cache.nbytes == 6000


@pytest.mark.parametrize("large", [1, 10**9], ids=["in a thread", "at once"])
async def test_of_a_request_as_many_entries_are_kept_as_there_is_room_for(
    large: int, monkeypatch
) -> None:
    monkeypatch.setattr(vector_cache, "_LARGE_BYTES", large)
    cache = cache_of(6000)
    await cache._keep({"old": entry()})
    await cache._keep({"a": entry(3000), "huge": entry(6001), "b": entry(3000), "c": entry()})
    assert {*cache._entries} == {"a", "b"}


def test_everything_that_vectors_depend_on_is_in_their_key() -> None:
    model, other, joined = FakeModel(), FakeModel(), FakeModel()
    for each, weights in {model: "m", other: "n", joined: "mp"}.items():
        each.spaces = {"dense": VectorSpace("dense", weights, *7 * ["same"])}
    texts = ["a", "b", "", "\\ud800", "a"]
    task = ModelWork(model, ALL, texts, "p")
    found = [
        keys_of(task, CUT_AT_END),
        keys_of(replace(task, prompt="q"), CUT_AT_END),
        keys_of(replace(task, input_type="query"), CUT_AT_END),
        keys_of(replace(task, model=other), CUT_AT_END),
        keys_of(replace(task, model=joined, prompt=""), CUT_AT_END),
        keys_of(task, TruncationOptions(side="left")),
        keys_of(task, TruncationOptions(max_tokens=7)),
    ]
    assert [[*each] for each in found] == [texts[:4]] * len(found)
    assert len({key for keys in found for key in keys.values()}) == len(found) * 4
    # Whether a text may be cut changes no vector of one that is.
    assert keys_of(task, TruncationOptions(truncate=False)) == found[0]
