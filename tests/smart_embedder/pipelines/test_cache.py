"""The cache of vectors: lookups, entries, keys and the memory limit."""

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
from smart_embedder.pipelines.cache import CachedPipeline, Entry, make_keys
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


def request(texts: list[str], outputs: Outputs = ALL, **fields: Any) -> EmbedRequest:
    return EmbedRequest(texts, outputs, **fields)


def cached_engine(model: FakeM3, metrics: Metrics | None = None, **settings):
    return engine_for(model, metrics, embedding_cache_bytes=2**28, **settings)


def without_timings(result) -> tuple:
    """The vectors, truncations and tokens of a result."""
    vectors = [
        (
            embedding.dense.tolist(),
            embedding.sparse.indices.tolist(),
            embedding.sparse.values.tolist(),
            embedding.colbert.tolist(),
        )
        for embedding in result.embeddings
    ]
    return vectors, result.truncations, result.tokens


async def test_a_text_is_computed_once_and_then_cached() -> None:
    model, metrics = FakeM3(), Metrics()
    async with cached_engine(model, metrics) as engine:
        first = await engine.embed(request(["ab", "abc", "ab"]))
        second = await engine.embed(request(["abc", "ab"]))
        third = await engine.embed(request(["d", "ab"]))
    assert model.batches == [[2, 3], [1]]
    assert without_timings(second)[0] == without_timings(first)[0][1:]
    assert without_timings(third)[0][1] == without_timings(first)[0][0]
    assert second.tokens == 5
    assert second.timings.tokenize == second.timings.inference == 0 < third.timings.inference
    assert metrics.value("embedder_cache_hits_total") == 3
    assert metrics.value("embedder_cache_misses_total") == 3
    assert engine.cache.count == 3


async def test_the_cache_is_off_by_default() -> None:
    model = FakeM3()
    async with engine_for(model) as engine:
        for _ in range(2):
            await engine.embed(request(["a"]))
    assert model.batches == [[1], [1]]


async def test_an_entry_is_used_only_if_it_has_all_kinds_that_are_asked_for() -> None:
    model = FakeM3()
    async with cached_engine(model) as engine:
        await engine.embed(request(["ab"], DENSE))
        await engine.embed(request(["ab"], SPARSE))
        both = await engine.embed(request(["ab"], Outputs(dense=True, sparse=True)))
        assert model.batches == [[2], [2]], "its entry has both kinds now"
        everything = await engine.embed(request(["ab"]))
        (found,) = (await engine.embed(request(["ab"], SPARSE))).embeddings
    assert model.batches == [[2], [2], [2]]
    assert both.embeddings[0].colbert is None
    assert (found.dense, found.colbert) == (None, None)
    async with engine_for(FakeM3()) as uncached:
        assert without_timings(await uncached.embed(request(["ab"]))) == without_timings(everything)


async def test_a_failure_is_not_cached() -> None:
    model = FakeM3()
    async with cached_engine(model) as engine:
        model.failures = [ValueError("broken"), None]
        with pytest.raises(InferenceError):
            await engine.embed(request(["ab"]))
        await engine.embed(request(["ab"]))
    assert model.batches == [[2], [2]]


async def test_a_cached_text_does_not_wait_for_the_queue() -> None:
    model = FakeM3()
    async with cached_engine(model, max_queue_size=1) as engine:
        await engine.embed(request(["known"]))
        async with busy(engine, model):
            waits = asyncio.create_task(engine.embed(request(["waits"])))
            await waiting(engine, 1)
            assert (await engine.embed(request(["known"]))).tokens == 5
        await waits


TEXTS = st.lists(st.sampled_from(["", "a", "bb", "ccc", "dddd", LONG]), min_size=1, max_size=6)
OPTIONS = st.sampled_from([{}, UNCUT, FROM_LEFT])


@settings(max_examples=30)
@given(st.lists(st.lists(st.tuples(TEXTS, OPTIONS), min_size=1, max_size=4), max_size=4))
async def test_results_and_errors_equal_those_of_an_engine_without_cache(waves) -> None:
    async def outcome(engine, texts, options):
        try:
            return without_timings(await engine.embed(request(texts, **options)))
        except TextTooLongError as error:
            return str(error), error.problems

    async with engine_for(FakeM3()) as uncached, cached_engine(FakeM3()) as engine:
        for wave in waves:
            found = await asyncio.gather(*(outcome(engine, *call) for call in wave))
            assert found == [await outcome(uncached, *call) for call in wave]


def test_an_entry_is_a_read_only_copy_with_the_same_bits() -> None:
    batch = np.float32([[0.1, 0.2], [1, 0]])
    weights = SparseVector(np.array([1, 9]), np.float32([0.3, 2]))
    vectors = TextEmbedding(batch[0], weights, batch[1:])
    copy = Entry(TokenizedText(np.array([3, 1, 2]), 5, exact=False), vectors).copy()
    expected = [array.tobytes() for array in vectors.arrays if array is not None]
    batch[:] = weights.values[:] = 0
    arrays = [array for array in copy.vectors.arrays if array is not None]
    assert [array.tobytes() for array in arrays] == expected
    for array in (*arrays, copy.read.ids):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7
    assert copy.read.ids.tolist() == [3, 1, 2]
    assert (copy.read.original_tokens, copy.read.exact) == (5, False)
    assert copy.nbytes == sum(map(len, expected)) + 24 + 1200


def cache_of(size: int) -> CachedPipeline:
    return CachedPipeline(None, None, size, EngineMetrics())  # type: ignore[arg-type]


def entry(nbytes: int = 2000) -> Entry:
    """An entry of this size."""
    vectors = TextEmbedding(np.zeros(nbytes - 1200, np.int8))
    return Entry(TokenizedText(np.zeros(0, np.int64), 0), vectors)


async def test_the_least_recently_used_entries_are_dropped_first() -> None:
    cache = cache_of(6000)
    await cache._store({key: entry() for key in "abc"})
    assert (cache.count, cache.nbytes) == (3, 6000)
    assert cache._entries.get("a") is not None
    await cache._store({"d": entry()})
    assert {*cache._entries} == {"a", "c", "d"}
    assert cache.nbytes == 6000


@pytest.mark.parametrize("large", [1, 10**9], ids=["in a thread", "at once"])
async def test_as_many_entries_of_a_request_are_stored_as_fit_into_the_cache(
    large: int, monkeypatch
) -> None:
    monkeypatch.setattr(vector_cache, "_LARGE_BYTES", large)
    cache = cache_of(6000)
    await cache._store({"old": entry()})
    await cache._store({"a": entry(3000), "huge": entry(6001), "b": entry(3000), "c": entry()})
    assert {*cache._entries} == {"a", "b"}


def test_a_key_depends_on_all_options_that_vectors_depend_on() -> None:
    first, other, joined = FakeModel(), FakeModel(), FakeModel()
    for model, weights in {first: "m", other: "n", joined: "mp"}.items():
        model.spaces = {"dense": VectorSpace("dense", weights, *7 * ["same"])}
    texts = ["a", "b", "", "\\ud800", "a"]
    work = ModelWork(first, ALL, texts, "p")
    found = [
        make_keys(work, CUT_AT_END),
        make_keys(replace(work, prompt="q"), CUT_AT_END),
        make_keys(replace(work, input_type="query"), CUT_AT_END),
        make_keys(replace(work, model=other), CUT_AT_END),
        make_keys(replace(work, model=joined, prompt=""), CUT_AT_END),
        make_keys(work, TruncationOptions(side="left")),
        make_keys(work, TruncationOptions(max_tokens=7)),
    ]
    assert [[*keys] for keys in found] == [texts[:4]] * len(found)
    assert len({key for keys in found for key in keys.values()}) == len(found) * 4
    # `truncate` decides only whether a text is refused.
    assert make_keys(work, TruncationOptions(truncate=False)) == found[0]
