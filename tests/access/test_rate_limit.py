"""Token buckets: in memory they match a plain reference; a store that fails costs nobody much.

In a real Redis they are one budget for all processes, or one for each process while Redis fails.
"""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis
from structlog.testing import capture_logs

from smart_embedder.access import rate_limit
from smart_embedder.access.rate_limit import (
    REDIS_PAUSE,
    REDIS_TIMEOUT,
    CircuitBreaker,
    MemoryBuckets,
    SharedBuckets,
)
from smart_embedder.errors import StartupError
from tests.support.redis_server import RedisServer, needs_redis, run_odd_redis, run_redis
from tests.support.skipped_time import in_skipped_time, now, turns


@dataclass
class Clock:
    """Stands in for the machine's clock, in nanoseconds."""

    now: int = 1000 * 10**9

    def read(self) -> int:
        return self.now

    def go_on(self, seconds: float) -> None:
        self.now += round(seconds * 10**9)


@contextmanager
def stopped_clock() -> Iterator[Clock]:
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr("smart_embedder.access.rate_limit.monotonic_ns", clock.read)
        yield clock


class ReferenceBucket:
    """A textbook token bucket, refilled continuously up to the burst."""

    def __init__(self, requests_per_minute: int, burst: int, now: int) -> None:
        self.rate = Fraction(requests_per_minute, 60 * 10**9)
        self.burst = burst
        self.tokens = Fraction(burst)
        self.updated = now

    def take(self, now: int) -> Fraction:
        """0, or the nanoseconds until there is a token."""
        self.tokens = min(Fraction(self.burst), self.tokens + (now - self.updated) * self.rate)
        self.updated = now
        if self.tokens >= 1:
            self.tokens -= 1
            return Fraction(0)
        return (1 - self.tokens) / self.rate


@given(
    requests_per_minute=st.integers(1, 10_000),
    burst=st.integers(1, 8),
    start=st.integers(0, 2**62),
    steps=st.lists(st.integers(0, 10 * 10**9), max_size=60),
)
async def test_every_answer_is_that_of_the_textbook_bucket(
    requests_per_minute: int, burst: int, start: int, steps: list[int]
) -> None:
    buckets = MemoryBuckets(requests_per_minute, burst)
    reference = ReferenceBucket(requests_per_minute, burst, start)
    with stopped_clock() as clock:
        clock.now = start
        for step in steps:
            clock.now += step
            expected = reference.take(clock.now)
            assert await buckets.take("key") == float(expected / 10**9)


# Where a clock stands still, as a coarse one does, sums of rounded intervals are one too large.
@given(
    requests_per_minute=st.integers(1, 10_000),
    burst=st.integers(1, 200),
    now=st.integers(0, 2**62),
)
async def test_a_burst_is_exactly_that_many_whatever_the_clock_says(
    requests_per_minute: int, burst: int, now: int
) -> None:
    buckets = MemoryBuckets(requests_per_minute, burst)
    with stopped_clock() as clock:
        clock.now = now
        assert [await buckets.take("key") for _ in range(burst)] == [0] * burst
        one_token = 60 / requests_per_minute
        assert await buckets.peek("key") == await buckets.take("key") == one_token
        clock.now += -(-60 * 10**9 // requests_per_minute)  # Rounded up.
        assert [await buckets.peek("key"), await buckets.take("key")] == [0, 0]
        assert await buckets.take("key") > 0


async def test_ever_new_addresses_leave_no_more_than_may_be_kept() -> None:
    buckets = MemoryBuckets(3600, 120)
    for number in range(150_000):
        await buckets.take(f"address:{number}")
    assert len(buckets) == 100_000


async def test_the_client_not_seen_for_longest_is_forgotten() -> None:
    buckets = MemoryBuckets(1, 1, max_clients=3)
    assert [await buckets.peek(key) for key in "abc"] == [0, 0, 0]
    assert len(buckets) == 0, "a look leaves no trace"
    for key in "abc":
        assert await buckets.take(key) == 0
    assert await buckets.take("a") > 0
    assert await buckets.take("d") == 0
    assert await buckets.take("a") > 0, "a was seen a moment ago, although it was refused"
    assert await buckets.take("b") == 0, "b had to go"
    await buckets.close()
    assert len(buckets) == 3


def test_a_redis_without_its_package_stops_the_start(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(StartupError, match=r"the package redis is not installed: pip install"):
        SharedBuckets("redis://localhost", 1, 1, on_error=lambda: None)


@pytest.mark.parametrize(
    ("wait", "believed"),
    [(None, True), (0.0, True), (1.9, True), (2.1, False), (-0.1, False), (float("nan"), False)],
)
def test_a_shared_bucket_is_believed_a_wait_that_it_can_have(wait, believed: bool) -> None:
    """Of sixty requests a minute, a second, and one more because clocks step."""
    errors = list[int]()
    buckets = SharedBuckets("redis://localhost", 60, 9, on_error=lambda: errors.append(1))
    with capture_logs() as log:
        for _ in range(2):
            assert buckets._believed(wait) == (wait if believed else None)
    assert len(errors) == 2 * (not believed)
    told = [(each["event"], each["log_level"]) for each in log]
    assert told == [("rate_limit_store_not_believed", "warning")] * (not believed)


# A store that fails.


@pytest.fixture
def in_loop_time(monkeypatch) -> None:
    """The pauses are those of the loop's time."""
    monkeypatch.setattr(rate_limit.time, "monotonic", now)


def in_store_time(test: Any) -> Any:
    return pytest.mark.usefixtures("in_loop_time")(in_skipped_time(test))


class Store:
    """Answers 7 after `seconds`, or fails; counts how it is asked."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.error: Exception | None = None
        self.asked = self.at_once = self.most_at_once = self.failures = 0
        self.breaker = CircuitBreaker(
            "cache", self._count, (KeyError,), while_gone="slower", when_back="as before"
        )

    def _count(self) -> None:
        self.failures += 1

    async def _answer(self) -> int:
        self.asked += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(self.seconds)
            if self.error is not None:
                raise self.error
            return 7
        finally:
            self.at_once -= 1

    async def call(self) -> int | None:
        return await self.breaker.call(self._answer)

    async def calls(self, count: int) -> list[int | None]:
        return await asyncio.gather(*(self.call() for _ in range(count)))


@in_store_time
async def test_a_store_that_answers_is_asked_by_all_and_by_a_few_at_once() -> None:
    store = Store()
    store.seconds = 0.2
    with capture_logs() as log:
        assert await store.calls(100) == [7] * 100
    assert (store.asked, store.most_at_once, store.failures, log) == (100, 16, 0, [])


@in_store_time
async def test_after_a_failure_nobody_asks_for_a_pause_and_then_one_while_the_others_do_not() -> (
    None
):
    store = Store()
    store.error = OSError("gone")
    for count in (1, 2, 3):
        assert await store.calls(50 if count > 1 else 1) == [None] * (50 if count > 1 else 1)
        assert (store.asked, store.failures) == (count, count)
        await asyncio.sleep(REDIS_PAUSE - 0.01)
        assert await store.calls(100) == [None] * 100
        assert (store.asked, store.failures) == (count, count)
        await asyncio.sleep(0.02)
    store.seconds = 0.2
    tries = asyncio.create_task(store.call())
    await turns()
    assert await store.calls(5) == [None] * 5, "they do not wait for the one that tries"
    await tries
    assert store.asked == 4
    store.error = None
    await asyncio.sleep(REDIS_PAUSE + 0.01)
    assert 7 in await store.calls(50)
    assert await store.calls(50) == [7] * 50


@in_store_time
async def test_no_answer_in_time_is_a_failure_and_the_wait_for_a_turn_is_none() -> None:
    store, began = Store(), now()
    store.seconds = 1000
    assert await store.call() is None
    assert now() - began == pytest.approx(REDIS_TIMEOUT, abs=0.01)
    assert store.failures == 1
    store = Store()
    store.seconds = 0.9 * REDIS_TIMEOUT
    assert await store.calls(64) == [7] * 64
    assert store.failures == 0


@pytest.mark.parametrize(
    ("error", "is_the_stores"),
    [
        *((kind, True) for kind in (KeyError, OSError, RuntimeError, TypeError, ValueError)),
        (ZeroDivisionError, False),
    ],
)
@in_store_time
async def test_the_errors_of_a_store_are_no_answer_and_others_are_the_callers(
    error: type[Exception], is_the_stores: bool
) -> None:
    store = Store()
    store.error = error("odd")
    with nullcontext() if is_the_stores else pytest.raises(error):
        assert await store.call() is None
    assert store.failures == is_the_stores


@in_store_time
async def test_only_the_changes_are_logged_with_their_effect() -> None:
    store = Store()
    with capture_logs() as log:
        for seconds in (1000.0, 1000.0, 0.0, 0.0):
            store.seconds = seconds
            await store.call()
            await asyncio.sleep(REDIS_PAUSE + 0.01)
        store.error = OSError()
        store.error.__cause__ = ValueError("the reason")
        await store.call()
        store.error = None
        await asyncio.sleep(REDIS_PAUSE + 0.01)
        await store.call()
        store.error = OSError("refused")
        await store.call()
    assert [(each["event"], each["log_level"], each["effect"]) for each in log] == [
        ("cache_gone", "warning", "slower"),
        ("cache_back", "info", "as before"),
        ("cache_gone", "warning", "slower"),
        ("cache_back", "info", "as before"),
        ("cache_gone", "warning", "slower"),
    ]
    assert [each["reason"] for each in log if "reason" in each] == [
        "no answer in 0.25 s",
        "the reason",
        "refused",
    ]


# In a real Redis.

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


@needs_redis
async def test_a_flood_on_two_holders_gets_their_one_budget(redis: RedisServer, patient) -> None:
    async with shared(redis.url, 1, 50) as one, shared(redis.url, 1, 50) as two:
        takes = [buckets.take("key") for _ in range(1000) for buckets in (one, two)]
        waits = await asyncio.gather(*takes)
        assert waits.count(0) == 50
        assert all(0 <= wait <= 60 for wait in waits)
        assert await two.take("another") == 0
        assert (one.errors, two.errors) == (0, 0)


@needs_redis
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


@needs_redis
async def test_a_full_bucket_is_no_longer_kept(redis: RedisServer, patient) -> None:
    async with shared(redis.url, 3600, 120) as buckets:
        await buckets.take("key")
        async with Redis.from_url(redis.url) as client:
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


@needs_redis
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


@needs_redis
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
@needs_redis
async def test_a_bucket_that_redis_cannot_have_is_counted_here(
    redis: RedisServer, patient, value: str
) -> None:
    with capture_logs() as log:
        async with shared(redis.url) as buckets, Redis.from_url(redis.url) as client:
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
