"""The cache in memory: what is kept, for how long, and under which key."""

from dataclasses import replace

import numpy as np
import pytest

from smart_embedder.engine.records import CUT_AT_END, UNLIMITED, Outputs, TruncationOptions
from smart_embedder.engine.requests import cache as vector_cache
from smart_embedder.engine.requests.cache import VectorCache, keys_of, make_cache
from smart_embedder.engine.requests.embedding import Task
from smart_embedder.engine.requests.shared_cache import CachedVectors
from smart_embedder.observability.metrics import Metrics
from smart_embedder.settings import Settings
from tests.engine.fakes import FakeModel, loaded


def entry(nbytes: int = 2000) -> CachedVectors:
    """One that takes so many bytes."""
    ids = np.zeros(0, np.int32)
    return CachedVectors(ids, 0, True, {"dense": np.zeros(nbytes - 1200, np.int8)})


class Shared:
    """What other processes have, and what they are given."""

    def __init__(self, **entries: CachedVectors) -> None:
        self.entries, self.closed = entries, False
        self.given: dict[str, CachedVectors] = {}
        self.asked: list[set[str]] = []

    async def fetch(self, models, _memory):
        self.asked.append(set(models))
        return {key: self.entries[key] for key in models if key in self.entries}

    def put(self, entries) -> None:
        self.given |= entries

    async def close(self) -> None:
        self.closed = True


async def test_the_least_recently_used_is_dropped_first_and_the_size_is_told() -> None:
    metrics = Metrics()
    cache = VectorCache(6000, None, metrics)
    await cache.put({key: entry() for key in "abc"})
    assert metrics.value("embedder_cache_entries") == 3
    assert metrics.value("embedder_cache_bytes") == 6000
    assert cache.get("a") is not None
    await cache.put({"d": entry()})
    assert [key for key in "abcd" if cache.get(key)] == ["a", "c", "d"]
    assert metrics.value("embedder_cache_bytes") == 6000
    await cache.close()


async def test_of_many_at_once_those_are_kept_for_which_there_is_room_together() -> None:
    cache = VectorCache(6000, None, Metrics())
    await cache.put({"old": entry()})
    await cache.put({"a": entry(3000), "huge": entry(6001), "b": entry(3000), "c": entry()})
    assert [key for key in ("old", "a", "huge", "b", "c") if cache.get(key)] == ["a", "b"]


@pytest.mark.parametrize("large", [1, 10**9])
async def test_what_is_kept_is_a_copy_however_large_it_is(large: int, monkeypatch) -> None:
    monkeypatch.setattr(vector_cache, "_LARGE_BYTES", large)
    cache, given = VectorCache(6000, None, Metrics()), entry()
    await cache.put({"a": given})
    kept = cache.get("a")
    assert kept is not None
    given.arrays["dense"][0] = 7
    assert kept.arrays["dense"][0] == 0


async def test_what_others_have_is_fetched_once_and_given_to_them_when_it_is_computed() -> None:
    shared, model = Shared(a=entry()), FakeModel()
    cache = VectorCache(6000, shared, Metrics())
    assert await cache.fetch({}, UNLIMITED) == {}
    assert shared.asked == []
    found = await cache.fetch({"a": model, "b": model}, UNLIMITED)
    assert found.keys() == {"a"}
    assert cache.get("a") is not None
    assert shared.given == {}
    await cache.put({"b": entry()})
    assert shared.given.keys() == {"b"}
    await cache.close()
    assert shared.closed


async def test_alone_it_fetches_nothing() -> None:
    assert await VectorCache(6000, None, Metrics()).fetch({"a": FakeModel()}, UNLIMITED) == {}


def test_there_is_a_cache_where_the_settings_ask_for_one() -> None:
    assert make_cache(Settings(), Metrics()) is None
    cache = make_cache(Settings(embedding_cache="memory", embedding_cache_bytes=7), Metrics())
    assert cache is not None


def test_all_that_vectors_depend_on_is_in_their_key() -> None:
    model, other, joined = FakeModel(), FakeModel(), FakeModel()
    fingerprints = {model: "m", other: "n", joined: "mp"}
    models = replace(loaded(model), dense=other, fingerprints=fingerprints)
    texts = ["a", "b", "", "\\ud800", "a"]
    task = Task(models, model, Outputs(dense=True, sparse=True), texts, "p")
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
    distinct = {key for keys in found for of_text in keys.values() for key in of_text.values()}
    assert len(distinct) == len(found) * 4 * 2
    assert found[0]["a"]["dense"].endswith(":dense")
    # Whether a text may be cut changes no vector of one that is.
    assert keys_of(task, TruncationOptions(truncate=False)) == found[0]
