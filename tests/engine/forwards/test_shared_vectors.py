"""The embedding cache behind two engines that share a real Redis, which may be away."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from app.engine.forwards import shared_vectors
from app.engine.forwards.shared_vectors import MOST_ENTRY_BYTES
from app.observability.metrics import Metrics
from tests.engine.engines import engine_for
from tests.engine.forwards.test_cached_forwards import KINDS, KindsModel, facts
from tests.support.redis_server import RedisServer, needs_redis, run_redis

PASSWORD = "very-secret"
TEXTS = ["ab", "", "abc" * 20]


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory):
    with run_redis(tmp_path_factory.mktemp("redis"), PASSWORD) as server:
        yield server


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timeout that a slow machine does not reach."""
    monkeypatch.setattr("app.access.circuit_breaker.REDIS_TIMEOUT", 60)


@asynccontextmanager
async def replica(redis: RedisServer, metrics: Metrics, model: KindsModel) -> AsyncIterator:
    async with engine_for(model, metrics, embedding_cache=redis.url) as engine:
        yield engine
        # What it has computed is written before the engine is closed.
        await asyncio.gather(*engine._pipelines._cache._shared._writes)


def client_of(engine):
    return engine._pipelines._cache._shared._client


@needs_redis
async def test_what_one_has_computed_the_other_finds_bit_for_bit(redis: RedisServer) -> None:
    one, two, metrics = KindsModel(), KindsModel(), Metrics()
    with capture_logs() as log:
        async with replica(redis, Metrics(), one) as first:
            await client_of(first).flushall()
            computed = await first.embed(TEXTS)
        async with replica(redis, metrics, two) as second:
            found = await second.embed(TEXTS)
            again = await second.embed(TEXTS)
    assert facts(computed) == facts(found) == facts(again)
    assert not two.batches
    hits = {
        source: metrics.value("embedder_cache_hits_total", source=source)
        for source in ("redis", "memory")
    }
    assert hits == {"redis": 3 * KINDS, "memory": 3 * KINDS}
    with pytest.raises(ValueError, match="read-only"):
        found.embeddings[0].dense[0] = 1
    (warning, *_) = log
    assert warning["event"] == "embedding_cache_store_unbounded"


@needs_redis
async def test_keys_tell_no_text_and_entries_expire(redis: RedisServer) -> None:
    async with replica(redis, Metrics(), KindsModel()) as engine:
        client = client_of(engine)
        await client.flushall()
        await engine.embed(["a secret text"], sparse=False, colbert=False)
        await asyncio.gather(*engine._pipelines._cache._shared._writes)
        (key,) = await client.keys("*")
        assert key.startswith(b"smart-embedder:vectors:")
        assert b"secret" not in key + await client.get(key)
        assert 0 < await client.ttl(key) <= 7 * 24 * 3600


@needs_redis
@pytest.mark.parametrize("damage", [b"", b"no safetensors", "another kind"])
async def test_a_damaged_entry_is_computed_anew(redis: RedisServer, damage) -> None:
    one, two = KindsModel(), KindsModel()
    async with replica(redis, Metrics(), one) as first:
        client = client_of(first)
        await client.flushall()
        computed = await first.embed(["ab"])
        await asyncio.gather(*first._pipelines._cache._shared._writes)
        dense, sparse = [(await client.keys(f"*:{kind}"))[0] for kind in ("dense", "sparse")]
        value = await client.get(sparse) if damage == "another kind" else damage
        await client.set(dense, value)
    async with replica(redis, Metrics(), two) as second:
        assert facts(await second.embed(["ab"])) == facts(computed)
    assert two.outputs[0][0].dense
    assert not two.outputs[0][0].sparse


@needs_redis
async def test_what_is_too_large_to_be_sent_stays_in_memory(redis: RedisServer) -> None:
    class Wide(KindsModel):
        def results(self, sequences):
            (made,) = super().results(sequences)
            wide = np.ones((1, MOST_ENTRY_BYTES), np.float32)
            return [type(made)(made.dense, made.sparse, wide)]

    model = Wide()
    async with replica(redis, Metrics(), model) as engine:
        await client_of(engine).flushall()
        await engine.embed(["ab"])
        await engine.embed(["ab"])
        await asyncio.gather(*engine._pipelines._cache._shared._writes)
        assert await client_of(engine).dbsize() == KINDS - 1
    assert len(model.batches) == 1


@needs_redis
async def test_without_redis_each_computes_for_itself_with_one_warning(tmp_path: Path) -> None:
    model, metrics = KindsModel(), Metrics()
    with run_redis(tmp_path, PASSWORD) as redis, capture_logs() as log:
        redis.kill()
        async with replica(redis, metrics, model) as engine:
            for i in range(5):
                assert (await engine.embed([f"{i}"])).tokens == 1
                await engine.embed([f"{i}"])
    assert len(model.batches) == 5
    assert metrics.value("embedder_cache_store_errors_total") >= 1
    (warning,) = log
    assert warning["event"] == "embedding_cache_store_gone"
    assert PASSWORD not in str(log)


FLOATS = st.lists(st.floats(width=32, allow_nan=False), max_size=5)


@given(FLOATS, st.lists(st.integers(0, 300_000), max_size=5), st.integers(0, 2**40), st.booleans())
def test_an_entry_is_read_as_it_was_written(values, ids, original, exact) -> None:
    entry = shared_vectors.CachedVectors(
        np.array(ids, np.int32), original, exact, {"dense": np.array(values, np.float32)}
    )
    read = shared_vectors._decode(shared_vectors._encode(entry), "dense")
    assert (read.original_tokens, read.exact) == (original, exact)
    assert read.ids.tolist() == ids
    assert read.arrays["dense"].tobytes() == entry.arrays["dense"].tobytes()


@given(st.binary(max_size=100))
def test_no_bytes_break_the_reading(content: bytes) -> None:
    assert shared_vectors._decode(content, "dense") is None
