"""Buckets in a real Redis: one budget for all processes, or for each one while Redis fails."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from smart_embedder.access.rate_limit import SharedBuckets
from tests.support.redis_server import RedisServer, needs_redis, run_odd_redis, run_redis

pytestmark = needs_redis

PASSWORD = "very-secret"


class Shared(SharedBuckets):
    """With a count of its failures."""

    def __init__(self, url: str, requests_per_minute: int = 1, burst: int = 5) -> None:
        self.errors = 0
        super().__init__(url, requests_per_minute, burst, on_error=self._count)

    def _count(self) -> None:
        self.errors += 1


@asynccontextmanager
async def shared(url: str, *args: int) -> AsyncIterator[Shared]:
    buckets = Shared(url, *args)
    try:
        yield buckets
    finally:
        await buckets.close()


@pytest.fixture
def redis(tmp_path: Path):
    with run_redis(tmp_path, PASSWORD) as server:
        yield server


@pytest.fixture
def patient(monkeypatch) -> None:
    """A timeout that a slow machine does not reach."""
    monkeypatch.setattr("smart_embedder.access.rate_limit.REDIS_TIMEOUT", 60)


async def test_a_flood_on_two_holders_gets_their_one_budget(redis: RedisServer, patient) -> None:
    async with shared(redis.url, 1, 50) as one, shared(redis.url, 1, 50) as two:
        takes = [buckets.take("key") for _ in range(1000) for buckets in (one, two)]
        waits = await asyncio.gather(*takes)
        assert waits.count(0) == 50
        assert all(0 <= wait <= 60 for wait in waits)
        assert await two.take("another") == 0
        assert (one.errors, two.errors) == (0, 0)


async def test_the_wait_is_the_real_one(redis: RedisServer, patient) -> None:
    async with shared(redis.url, 1, 1) as buckets:
        assert await buckets.take("key") == 0
        first, second = await buckets.take("key"), await buckets.take("key")
        assert 0 < second < first <= 60


async def test_a_look_at_a_bucket_tells_what_all_have_taken_and_takes_nothing(
    redis: RedisServer, patient
) -> None:
    async with shared(redis.url, 1, 2) as one, shared(redis.url, 1, 2) as two:
        assert [await two.peek("key") for _ in range(5)] == [0] * 5
        await one.take("key")
        assert [await two.peek("key") for _ in range(5)] == [0] * 5
        await one.take("key")
        wait = await two.peek("key")
        assert 50 < wait <= 60
        assert await one.take("key") <= wait
        assert await two.peek("another") == 0
        assert (one.errors, two.errors) == (0, 0)


async def test_a_bucket_of_which_something_impossible_is_said_is_told_of_once(
    redis: RedisServer, patient
) -> None:
    with capture_logs() as log:
        async with shared(redis.url, 60, 1) as buckets:
            client = buckets._store._backend.get_client()
            for key in ("one", "two"):
                await client.set(f"smart-embedder:v1:gcra:{key}", "1e300")
                assert await buckets.take(key) == 0
                assert 0 < await buckets.peek(key) <= 1
            assert buckets.errors == 4
    (warning,) = log
    assert warning["event"] == "rate_limit_store_not_believed"
    assert warning["log_level"] == "warning"


async def test_a_full_bucket_is_no_longer_kept(redis: RedisServer, patient) -> None:
    async with shared(redis.url, 3600, 120) as buckets:
        await buckets.take("key")
        client = buckets._store._backend.get_client()
        (key,) = await client.keys("*")
        assert key == b"smart-embedder:v1:gcra:key"
        assert 0 < await client.pttl(key) <= 1000


async def test_without_redis_each_process_counts_with_one_warning_and_no_password() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"redis://:{PASSWORD}@127.0.0.1:{nobody.getsockname()[1]}/0"
        with capture_logs() as log:
            async with shared(url) as buckets:
                waits = [await buckets.take("key") for _ in range(100)]
                assert waits[:5] == [0] * 5
                assert all(0 < wait <= 60 for wait in waits[5:])
                assert await buckets.peek("key") > 0
                assert await buckets.peek("another") == await buckets.take("another") == 0
                assert buckets.errors >= 1
    (warning,) = log
    assert (warning["event"], warning["log_level"]) == ("rate_limit_store_gone", "warning")
    assert PASSWORD not in str(log)


async def test_a_wrong_password_is_a_failure_like_any_other(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine no answer might come in time, which would be another failure.
    monkeypatch.setattr("smart_embedder.access.rate_limit.REDIS_TIMEOUT", 30)
    with capture_logs() as log:
        async with shared(redis.url.replace(PASSWORD, "wrong-secret")) as buckets:
            assert [await buckets.take("key") for _ in range(10)].count(0) == 5
    (warning,) = log
    assert "invalid username-password pair" in warning["reason"]
    assert "wrong-secret" not in str(log)


async def test_a_silent_redis_is_asked_by_few_and_limits_again_once_it_answers(
    redis: RedisServer,
) -> None:
    with capture_logs() as log:
        async with shared(redis.url) as buckets:
            waits = [await buckets.take("key") for _ in range(6)]
            assert waits.count(0) == 5
            redis.freeze()
            waits = await asyncio.gather(*(buckets.take("key") for _ in range(10)))
            assert waits.count(0) == 5
            errors = buckets.errors
            assert 1 <= errors <= 10
            assert 0 not in [await buckets.take("key") for _ in range(100)]
            assert buckets.errors < errors + 50
            redis.thaw()
            async with asyncio.timeout(30):
                while len(log) < 2:
                    assert await buckets.take("key")
                    buckets._breaker._retry_at = 0.0  # The pause is over: ask at once.
    events = [entry["event"] for entry in log]
    assert events == ["rate_limit_store_gone", "rate_limit_store_back"]
    assert "no answer in 0.25 s" in log[0]["reason"]


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e300", "no number"])
async def test_a_bucket_that_redis_cannot_have_is_counted_here(
    redis: RedisServer, patient, value: str
) -> None:
    with capture_logs() as log:
        async with shared(redis.url) as buckets:
            client = buckets._store._backend.get_client()
            await client.set("smart-embedder:v1:gcra:key", value)
            waits = [await buckets.take("key") for _ in range(10)]
            assert all(0 <= wait <= 61 for wait in [*waits, await buckets.peek("key")])
            assert waits.count(0) == 5
    assert len(log) <= 1


@pytest.mark.parametrize(
    "answer",
    [b":1\r\n", b"+OK\r\n", b"$-1\r\n", b"*0\r\n", b"*2\r\n:0\r\n:1\r\n", b"*x\r\n", b"what?\r\n",
     b"*4\r\n:1\r\n:0\r\n$1\r\n1\r\n*0\r\n", b"*4\r\n:1\r\n:0\r\n$1\r\n1\r\n$3\r\ninf\r\n"],
    ids=lambda answer: repr(answer[:20]),
)  # fmt: skip
async def test_an_answer_of_an_odd_type_is_as_good_as_none(answer: bytes) -> None:
    with run_odd_redis(answer) as odd, capture_logs() as log:
        async with shared(odd.url) as buckets:
            assert [await buckets.take("key") for _ in range(10)].count(0) == 5
            assert await buckets.peek("another") == 0
            assert buckets.errors >= 1
    (warning,) = log
    assert warning["log_level"] == "warning"
