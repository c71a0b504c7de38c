"""The embedding cache behind two engines that share a real Redis, which may be away."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from smart_embedder.engine.records import AnswerMemory, Outputs
from smart_embedder.engine.requests import shared_cache
from smart_embedder.engine.requests.shared_cache import MOST_ENTRY_BYTES, CachedVectors
from smart_embedder.errors import InvalidRequestError
from smart_embedder.observability.metrics import Metrics
from tests.engine.engines import engine_for
from tests.engine.requests.test_cache_cached_forwards import KINDS, KindsModel, asked, facts
from tests.support.redis_server import RedisServer, needs_redis, run_odd_redis, run_redis

PASSWORD = "very-secret"
TEXTS = ["ab", "", "abc" * 20]


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory):
    with run_redis(tmp_path_factory.mktemp("redis"), PASSWORD) as server:
        yield server


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timeout that a slow machine does not reach."""
    monkeypatch.setattr("smart_embedder.access.rate_limit.REDIS_TIMEOUT", 60)


@asynccontextmanager
async def replica(redis: RedisServer, metrics: Metrics, model: KindsModel) -> AsyncIterator:
    async with engine_for(model, metrics, embedding_cache=redis.url) as engine:
        yield engine
        # What it has computed is written before the engine is closed.
        await asyncio.gather(*engine._cache._shared._writes)


def client_of(engine):
    return engine._cache._shared._client


@needs_redis
async def test_what_one_has_computed_the_other_finds_bit_for_bit(redis: RedisServer) -> None:
    one, two, metrics = KindsModel(), KindsModel(), Metrics()
    with capture_logs() as log:
        async with replica(redis, Metrics(), one) as first:
            await client_of(first).flushall()
            computed = await first.embed(asked(TEXTS))
        async with replica(redis, metrics, two) as second:
            found = await second.embed(asked(TEXTS))
            again = await second.embed(asked(TEXTS))
    assert facts(computed) == facts(found) == facts(again)
    assert not two.batches
    async with replica(redis, Metrics(), KindsModel()) as third:
        (own,) = await client_of(third).client_list()
        assert own["cmd"].startswith("client"), "the others have closed their connections"
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
        await engine.embed(asked(["a secret text"], Outputs(dense=True)))
        await asyncio.gather(*engine._cache._shared._writes)
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
        computed = await first.embed(asked(["ab"]))
        await asyncio.gather(*first._cache._shared._writes)
        dense, sparse = [(await client.keys(f"*:{kind}"))[0] for kind in ("dense", "sparse")]
        value = await client.get(sparse) if damage == "another kind" else damage
        await client.set(dense, value)
    async with replica(redis, Metrics(), two) as second:
        assert facts(await second.embed(asked(["ab"]))) == facts(computed)
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
        await engine.embed(asked(["ab"]))
        await engine.embed(asked(["ab"]))
        await asyncio.gather(*engine._cache._shared._writes)
        assert await client_of(engine).dbsize() == KINDS - 1
    assert len(model.batches) == 1


@needs_redis
async def test_no_more_is_fetched_than_an_answer_may_hold(redis: RedisServer) -> None:
    class Wide(KindsModel):
        colbert_width = 2**14

        def results(self, sequences):
            (ids,) = sequences
            (made,) = super().results(sequences)
            wide = np.eye(len(ids) - 1, self.colbert_width, dtype=np.float32)
            return [type(made)(made.dense, made.sparse, wide)]

    texts = [f"a{i}" for i in range(10, 34)]
    async with replica(redis, Metrics(), Wide()) as first:
        await client_of(first).flushall()
        for text in texts:
            await first.embed(asked([text]))
    async with replica(redis, Metrics(), Wide()) as second:
        before = await client_of(second).info("stats")
        small = AnswerMemory(6 * 4 * Wide.colbert_width)
        with pytest.raises(InvalidRequestError, match=r"tokens need .* this answer may hold"):
            await second.embed(asked(texts, answer=small))
        after = await client_of(second).info("stats")
        of_one_call = 8 * 2 * 4 * Wide.colbert_width
        assert sent_bytes(after) - sent_bytes(before) < 1.5 * of_one_call


def sent_bytes(stats: bytes) -> int:
    return int(re.search(rb"total_net_output_bytes:(\d+)", stats)[1])


@needs_redis
async def test_without_redis_each_computes_for_itself_with_one_warning(tmp_path: Path) -> None:
    model, metrics = KindsModel(), Metrics()
    with run_redis(tmp_path, PASSWORD) as redis, capture_logs() as log:
        redis.kill()
        async with replica(redis, metrics, model) as engine:
            for i in range(5):
                assert (await engine.embed(asked([f"{i}"]))).tokens == 1
                await engine.embed(asked([f"{i}"]))
    assert len(model.batches) == 5
    assert metrics.value("embedder_cache_store_errors_total") >= 1
    (warning,) = log
    assert warning["event"] == "embedding_cache_store_gone"
    assert PASSWORD not in str(log)


@given(
    st.floats(width=32, allow_nan=False, allow_infinity=False).filter(bool),
    st.lists(st.integers(0, 300_000), max_size=5),
    st.integers(5, 2**40),
    st.booleans(),
)
@example(3e38, [], 5, True)
def test_an_entry_is_read_as_it_was_written(value, ids, original, exact) -> None:
    entry = CachedVectors(
        np.array(ids, np.int32), original, exact, {"dense": np.array([value], np.float32)}
    )
    read = shared_cache._decode(shared_cache._encode(entry), "dense", KindsModel())
    assert (read.original_tokens, read.exact) == (original, exact)
    assert read.ids.tolist() == ids
    assert read.arrays["dense"].tobytes() == entry.arrays["dense"].tobytes()


@given(st.binary(max_size=100))
def test_no_bytes_break_the_reading(content: bytes) -> None:
    assert isinstance(shared_cache._decode(content, "dense", KindsModel()), str)


def floats(*values) -> np.ndarray:
    return np.array(values, np.float32)


def weights(indices: list[int], values: list[float]) -> dict[str, np.ndarray]:
    return {"indices": np.array(indices, np.int64), "values": floats(*values)}


class UnitModel(KindsModel):
    """Its dense vectors have unit length."""

    normalizes = True
    dense_width = 2


IMPOSSIBLE = {
    "zero": {"dense": floats(0, 0)},
    "not finite": {"dense": floats(np.nan, 1)},
    "empty": {"dense": floats()},
    "of another width": {"dense": floats(1, 0, 0)},
    "not of unit length": {"dense": floats(3, 4)},
    "enormous": {"dense": floats(3e38, 3e38)},
    "too many rows": {"colbert": np.tile(floats(1, 0), (50, 1))},
    "a zero row": {"colbert": floats((1, 0), (0, 0))},
    "a row not of unit length": {"colbert": floats((1, 0), (9, 9))},
    "rows of another width": {"colbert": floats((1, 0, 0), (1, 0, 0))},
    "infinite states": {"states": np.full((3, 4), np.inf, np.float32)},
    "states of fewer tokens": {"states": np.ones((2, 4), np.float32)},
    "a negative id": weights([-5, 1], [1, 1]),
    "an id twice": weights([7, 7], [1, 1]),
    "falling ids": weights([8, 7], [1, 1]),
    "an enormous id": weights([7, 2**40], [1, 1]),
    "an infinite weight": weights([7], [np.inf]),
    "a weight of zero": weights([7], [0]),
    "a weight too many": weights([7], [1, 1]),
}


@pytest.mark.parametrize("arrays", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_no_vectors_are_believed_that_the_model_cannot_have_made(arrays) -> None:
    kind = "sparse" if "indices" in arrays else next(iter(arrays))
    entry = CachedVectors(np.array([1, 2, 3], np.int32), 3, True, arrays)
    assert isinstance(shared_cache._decode(shared_cache._encode(entry), kind, UnitModel()), str)


@pytest.mark.parametrize(("ids", "original"), [([-1, 2, 3], 3), ([1, 2, 3], 2), ([1, 2, 3], -3)])
def test_no_tokens_are_believed_that_no_text_has(ids, original) -> None:
    entry = CachedVectors(np.array(ids, np.int32), original, True, {"dense": floats(0.6, 0.8)})
    value = shared_cache._encode(entry)
    assert isinstance(shared_cache._decode(value, "dense", UnitModel()), str)


@needs_redis
async def test_kinds_of_one_text_with_different_tokens_are_computed_anew(
    redis: RedisServer,
) -> None:
    one, two, three = KindsModel(), KindsModel(), KindsModel()
    async with replica(redis, Metrics(), one) as first:
        client = client_of(first)
        await client.flushall()
        computed = await first.embed(asked(["ab"]))
        await asyncio.gather(*first._cache._shared._writes)
        (key,) = await client.keys("*:dense")
        forged = CachedVectors(np.array([1, 2, 3], np.int32), 9, True, {"dense": floats(5)})
        await client.set(key, shared_cache._encode(forged))
    async with replica(redis, Metrics(), two) as second:
        assert facts(await second.embed(asked(["ab"]))) == facts(computed)
        assert facts(await second.embed(asked(["ab"]))) == facts(computed)
    assert two.batches == [[2]]
    async with replica(redis, Metrics(), three) as third:  # It was put right in Redis as well.
        assert facts(await third.embed(asked(["ab"]))) == facts(computed)
    assert not three.batches


ODD_ANSWERS = [b":1\r\n", b"+OK\r\n", b"$-1\r\n", b"*-1\r\n", b"*0\r\n", b"*1\r\n:5\r\n", b"*x\r\n",
    b"*3\r\n:1\r\n$1\r\nx\r\n*0\r\n", b"-ERR no\r\n", b"what?\r\n", b"*1\r\n" * 5000]  # fmt: skip


@pytest.mark.parametrize("answer", ODD_ANSWERS, ids=lambda answer: repr(answer[:20]))
async def test_an_answer_of_an_odd_type_counts_as_a_miss(answer: bytes) -> None:
    model, metrics = KindsModel(), Metrics()
    with run_odd_redis(answer) as odd, capture_logs() as log:
        async with replica(odd, metrics, model) as engine:
            for i in range(3):
                assert (await engine.embed(asked([f"{i}"]))).tokens == 1
    assert len(model.batches) == 3
    # Null stands for no entry where it is the answer to one key; the rest is told of once.
    assert [entry["log_level"] for entry in log] == ["warning"] * len(log)
    assert len({entry["event"] for entry in log}) == len(log)
    assert metrics.value("embedder_cache_store_errors_total") >= len(log)
