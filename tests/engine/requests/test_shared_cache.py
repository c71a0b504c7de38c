"""The cache that processes share: its entries, and engines with one Redis, which may be away."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from redis import Redis
from smart_embedder.engine.requests.shared_cache import (
    MOST_ENTRY_BYTES,
    CachedVectors,
    join,
    of_one_text,
    split,
)
from structlog.testing import capture_logs

from smart_embedder.engine.records import (
    AnswerMemory,
    Outputs,
    SparseVector,
    TextEmbedding,
    TokenizedText,
)
from smart_embedder.engine.requests import shared_cache
from smart_embedder.errors import InvalidRequestError
from smart_embedder.observability.metrics import Metrics
from tests.engine.engines import engine_for
from tests.engine.fakes import FakeModel
from tests.engine.requests.test_cache import KINDS, KindsModel, asked, facts
from tests.support.redis_server import RedisServer, needs_redis, run_odd_redis, run_redis

TEXT = TokenizedText(np.array([3, 1, 2], np.int64), 5, exact=False)
SPARSE = SparseVector(np.array([1, 2, 9]), np.float32([0.5, 1, 2]))
DENSE = np.float32([0.6, 0.8])
ROWS = np.float32([[1, 0], [0, 1]])
STATES = np.float32([[1, 2, 3], [4, 5, 6], [7, 8, 9]])


def model() -> FakeModel:
    made = FakeModel()
    made.dense_width = made.colbert_width = 2
    made.states_width = 3
    return made


@pytest.mark.parametrize(
    "made",
    [
        TextEmbedding(DENSE, SPARSE, ROWS, STATES),
        TextEmbedding(dense=DENSE),
        TextEmbedding(sparse=SPARSE),
        TextEmbedding(colbert=ROWS, states=STATES),
    ],
)
def test_what_is_split_by_kind_is_joined_to_the_same(made: TextEmbedding) -> None:
    entries = split(TEXT, made)
    text, joined = join(entries)
    assert (text.ids.tolist(), text.original_tokens, text.exact) == ([3, 1, 2], 5, False)
    assert text.ids.dtype == np.int64
    for kind in ("dense", "colbert", "states"):
        expected, found = getattr(made, kind), getattr(joined, kind)
        assert (found is None) == (expected is None) == (kind not in entries)
        if found is not None:
            np.testing.assert_array_equal(found, expected)
    assert (joined.sparse is None) == (made.sparse is None)
    if joined.sparse is not None:
        assert joined.sparse.indices.tolist() == [1, 2, 9]
        assert joined.sparse.values.tolist() == [0.5, 1, 2]


def test_nobody_can_change_what_is_kept_and_it_is_no_view_of_a_batch() -> None:
    batch = np.float32([[0.6, 0.8], [1, 0]])
    entry = split(TEXT, TextEmbedding(dense=batch[0]))["dense"]
    for kept in (entry, entry.copied()):
        for array in (kept.ids, kept.arrays["dense"]):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 7
    copied = entry.copied()
    batch[0] = 0
    assert entry.arrays["dense"].tolist() == [0, 0]
    np.testing.assert_array_equal(copied.arrays["dense"], DENSE)
    assert (copied.original_tokens, copied.exact) == (5, False)


def test_an_entry_counts_its_arrays_its_tokens_and_what_is_around_them() -> None:
    kept = split(TEXT, TextEmbedding(DENSE, SPARSE))
    assert kept["dense"].nbytes == 8 + 12 + 1200
    assert kept["sparse"].nbytes == 24 + 12 + 12 + 1200


def test_kinds_are_of_one_text_where_its_tokens_are_the_same() -> None:
    first = split(TEXT, TextEmbedding(DENSE))["dense"]
    assert of_one_text([first])
    assert of_one_text([first, first.copied(), first])
    for other in (
        replace(first, ids=np.array([3, 1, 3], np.int32)),
        replace(first, ids=np.array([3, 1], np.int32)),
        replace(first, original_tokens=6),
        replace(first, exact=True),
    ):
        assert not of_one_text([first, first, other])


def entry(kind: str, *arrays: np.ndarray, ids=(3, 1, 2), original: int = 5) -> CachedVectors:
    names = ("indices", "values") if kind == "sparse" else (kind,)
    named = dict(zip(names, arrays, strict=True))
    return CachedVectors(np.array(ids, np.int32), original, True, named)


GOOD = {
    "dense": (DENSE,),
    "colbert": (ROWS,),
    "states": (STATES,),
    "sparse": (SPARSE.indices, SPARSE.values),
}


def read(entry: CachedVectors, kind: str, by: FakeModel | None = None) -> CachedVectors | str:
    """What another process reads of it, or why nothing."""
    return shared_cache._decode(shared_cache._encode(entry), kind, by or model())


@pytest.mark.parametrize("kind", GOOD)
def test_what_the_model_makes_is_believed(kind: str) -> None:
    for good in (
        entry(kind, *GOOD[kind]),
        entry(kind, *GOOD[kind], original=3),
        # Where it begins with token 0, as bge-m3's do, which may have a weight.
        entry(kind, *GOOD[kind], ids=(0, 1, 2)),
    ):
        assert isinstance(read(good, kind), CachedVectors)
    first = entry("sparse", np.array([0, 2, (1 << 28) - 1]), SPARSE.values)
    assert isinstance(read(first, "sparse"), CachedVectors)


TOKENS, UNIT = "its tokens are not those of a text", "a vector has not unit length"
IDS, SHAPE = "not ascending token ids", "numbers are not the"
BAD = {
    "a negative token": ("dense", (DENSE,), {"ids": (3, -1, 2)}, TOKENS),
    "more tokens than the text had": ("dense", (DENSE,), {"original": 2}, TOKENS),
    "not a number": ("dense", (np.float32([0.6, np.nan]),), {}, "a number is not finite"),
    "another width": ("dense", (np.float32([1, 0, 0]),), {}, f"(1, 3) {SHAPE} (1, 2)"),
    "no width": ("dense", (np.float32([]),), {}, SHAPE),
    "zero": ("dense", (np.float32([0, 0]),), {}, "a vector is zero"),
    "not of unit length": ("dense", (np.float32([0.6, 0.9]),), {}, UNIT),
    "enormous": ("dense", (np.float32([3e38, 3e38]),), {}, UNIT),
    "a row too few": ("colbert", (ROWS[:1],), {}, f"(1, 2) {SHAPE} (2, 2)"),
    "too many rows": ("colbert", (np.tile(ROWS, (25, 1)),), {}, SHAPE),
    "rows of another width": ("colbert", (np.eye(2, 3, dtype=np.float32),), {}, SHAPE),
    "rows not of unit length": ("colbert", (ROWS * np.float32(2),), {}, UNIT),
    "a zero row": ("colbert", (ROWS * np.float32([[1], [0]]),), {}, "a vector is zero"),
    "states of fewer tokens": ("states", (STATES[:2],), {}, f"(2, 3) {SHAPE} (3, 3)"),
    "infinite states": ("states", (STATES * np.float32(np.inf),), {}, "a number is not finite"),
    "a weight too many": ("sparse", (SPARSE.indices[:2], SPARSE.values), {}, "not one weight for"),
    "falling ids": ("sparse", (np.array([1, 9, 2]), SPARSE.values), {}, IDS),
    "an id twice": ("sparse", (np.array([1, 2, 2]), SPARSE.values), {}, IDS),
    "a negative id": ("sparse", (np.array([-1, 2, 9]), SPARSE.values), {}, IDS),
    "an enormous id": ("sparse", (np.array([1, 2, 1 << 28]), SPARSE.values), {}, IDS),
    "a weight of zero": ("sparse", (SPARSE.indices, np.float32([1, 0, 1])), {}, "is not above"),
    "an infinite weight": (
        "sparse",
        (SPARSE.indices, np.float32([1, np.inf, 1])),
        {},
        "not finite",
    ),
}


@pytest.mark.parametrize(("kind", "arrays", "changes", "reason"), BAD.values(), ids=BAD)
def test_what_the_model_cannot_have_made_is_not(kind, arrays, changes, reason) -> None:
    assert reason in read(entry(kind, *arrays, **changes), kind)


def test_a_model_that_does_not_normalise_may_make_any_dense_vector() -> None:
    made = model()
    made.normalizes = False
    assert isinstance(read(entry("dense", DENSE * 5), "dense", made), CachedVectors)
    assert read(entry("colbert", ROWS * 5), "colbert", made) == UNIT
    nearly = entry("dense", DENSE * np.float32(1.009))
    assert isinstance(read(nearly, "dense"), CachedVectors)


PASSWORD = "very-secret"
TEXTS = ["ab", "", "abc" * 20]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    with run_redis(tmp_path_factory.mktemp("redis"), PASSWORD) as running:
        yield running


@pytest.fixture
def redis(server: RedisServer):
    """A client of an empty one."""
    with Redis.from_url(server.url) as client:
        client.flushall()
        yield client


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timeout that a slow machine does not reach."""
    monkeypatch.setattr("smart_embedder.access.rate_limit.REDIS_TIMEOUT", 60)


@asynccontextmanager
async def replica(url: str, model: KindsModel, metrics: Metrics | None = None) -> AsyncIterator:
    async with engine_for(model, metrics, embedding_cache=url) as engine:
        yield engine
        # What it has computed is written before the engine is closed.
        await asyncio.gather(*engine._cache._shared._writes)


@needs_redis
async def test_what_one_has_computed_the_other_finds_bit_for_bit(server, redis) -> None:
    one, two, metrics = KindsModel(), KindsModel(), Metrics()
    before = {each["id"] for each in redis.client_list()}
    with capture_logs() as log:
        async with replica(server.url, one) as first:
            computed = await first.embed(asked(TEXTS))
        async with replica(server.url, two, metrics) as second:
            found = [await second.embed(asked(TEXTS)) for _ in range(2)]
    assert [facts(each) for each in found] == [facts(computed)] * 2
    assert not two.batches
    assert {each["id"] for each in redis.client_list()} <= before, "they close their connections"
    hits = {
        source: metrics.value("embedder_cache_hits_total", source=source)
        for source in ("redis", "memory")
    }
    assert hits == {"redis": 3 * KINDS, "memory": 3 * KINDS}
    with pytest.raises(ValueError, match="read-only"):
        found[0].embeddings[0].dense[0] = 1
    assert log[0]["event"] == "embedding_cache_store_unbounded"


@needs_redis
async def test_keys_tell_no_text_and_entries_expire(server, redis) -> None:
    async with replica(server.url, KindsModel()) as engine:
        await engine.embed(asked(["a secret text"], Outputs(dense=True)))
    (key,) = redis.keys("*")
    assert key.startswith(b"smart-embedder:vectors:")
    assert b"secret" not in key + redis.get(key)
    assert 0 < redis.ttl(key) <= 7 * 24 * 3600


FORGED = CachedVectors(np.array([1, 2, 3], np.int32), 9, True, {"dense": np.float32([5])})


@needs_redis
@pytest.mark.parametrize("damage", ["nothing", "no safetensors", "another kind", "other tokens"])
async def test_an_entry_that_cannot_be_right_is_computed_anew_and_put_right(
    server, redis, damage: str
) -> None:
    one, two, three = KindsModel(), KindsModel(), KindsModel()
    async with replica(server.url, one) as first:
        computed = await first.embed(asked(["ab"]))
    dense, sparse = [redis.keys(f"*:{kind}")[0] for kind in ("dense", "sparse")]
    values = {"nothing": b"", "no safetensors": b"no", "another kind": redis.get(sparse)}
    redis.set(dense, values.get(damage, shared_cache._encode(FORGED)))
    async with replica(server.url, two) as second:
        for _ in range(2):
            assert facts(await second.embed(asked(["ab"]))) == facts(computed)
    (((made,),),) = (two.outputs,)
    # Where two kinds are not of the same tokens, nobody knows which one is right.
    assert (made.dense, made.sparse) == (True, damage == "other tokens")
    async with replica(server.url, three) as third:
        assert facts(await third.embed(asked(["ab"]))) == facts(computed)
    assert not three.batches


class Wide(KindsModel):
    """Each row has 16,384 numbers."""

    colbert_width = 2**14

    def results(self, sequences):
        (ids,), (made,) = sequences, super().results(sequences)
        wide = np.eye(len(ids) - 1, self.colbert_width, dtype=np.float32)
        return [replace(made, colbert=wide)]


@needs_redis
async def test_what_is_too_large_to_be_sent_stays_in_memory(server, redis) -> None:
    model = Wide()
    async with replica(server.url, model) as engine:
        for _ in range(2):
            await engine.embed(asked(["a" * (2 + MOST_ENTRY_BYTES // (4 * 2**14))]))
    assert redis.dbsize() == KINDS - 1
    assert len(model.batches) == 1


@needs_redis
async def test_no_more_is_fetched_than_an_answer_may_hold(server, redis) -> None:
    texts = [f"a{i}" for i in range(10, 34)]
    async with replica(server.url, Wide()) as first:
        for text in texts:
            await first.embed(asked([text]))
    async with replica(server.url, Wide()) as second:
        before = redis.info("stats")["total_net_output_bytes"]
        small = AnswerMemory(6 * 4 * Wide.colbert_width)
        with pytest.raises(InvalidRequestError, match=r"tokens need .* this answer may hold"):
            await second.embed(asked(texts, answer=small))
        sent = redis.info("stats")["total_net_output_bytes"] - before
        of_one_call = 8 * 2 * 4 * Wide.colbert_width
        assert sent < 1.5 * of_one_call


@needs_redis
async def test_without_redis_each_computes_for_itself_with_one_warning(tmp_path: Path) -> None:
    model, metrics = KindsModel(), Metrics()
    with run_redis(tmp_path, PASSWORD) as killed, capture_logs() as log:
        killed.kill()
        async with replica(killed.url, model, metrics) as engine:
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


ODD_ANSWERS = [b":1\r\n", b"+OK\r\n", b"$-1\r\n", b"*-1\r\n", b"*0\r\n", b"*1\r\n:5\r\n", b"*x\r\n",
    b"*3\r\n:1\r\n$1\r\nx\r\n*0\r\n", b"-ERR no\r\n", b"what?\r\n", b"*1\r\n" * 5000]  # fmt: skip


@pytest.mark.parametrize("answer", ODD_ANSWERS, ids=lambda answer: repr(answer[:20]))
async def test_an_answer_of_an_odd_type_counts_as_a_miss(answer: bytes) -> None:
    model, metrics = KindsModel(), Metrics()
    with run_odd_redis(answer) as odd, capture_logs() as log:
        async with replica(odd.url, model, metrics) as engine:
            for i in range(3):
                assert (await engine.embed(asked([f"{i}"]))).tokens == 1
    assert len(model.batches) == 3
    # Null stands for no entry where it is the answer to one key; the rest is told of once.
    assert [entry["log_level"] for entry in log] == ["warning"] * len(log)
    assert len({entry["event"] for entry in log}) == len(log)
    assert metrics.value("embedder_cache_store_errors_total") >= len(log)
