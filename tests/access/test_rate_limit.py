"""Token buckets in memory: they match a plain reference, and their number is bounded."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smart_embedder.access.rate_limit import MemoryBuckets, SharedBuckets
from smart_embedder.errors import StartupError


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


@pytest.fixture
def clock() -> Iterator[Clock]:
    with stopped_clock() as clock:
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


async def test_a_million_addresses_leave_no_more_than_may_be_kept() -> None:
    buckets = MemoryBuckets(3600, 120)
    for number in range(1_000_000):
        await buckets.take(f"address:{number}")
    assert len(buckets) == 100_000


async def test_the_client_not_seen_for_longest_is_forgotten() -> None:
    buckets = MemoryBuckets(1, 1, max_clients=3)
    for key in "abc":
        assert await buckets.take(key) == 0
    assert await buckets.take("a") > 0
    assert await buckets.take("d") == 0
    assert await buckets.take("a") > 0, "a was seen a moment ago, although it was refused"
    assert await buckets.take("b") == 0, "b had to go"
    assert len(buckets) == 3


def test_a_redis_without_its_package_stops_the_start(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(StartupError, match=r"the package redis is not installed: pip install"):
        SharedBuckets("redis://localhost", 1, 1, on_error=lambda: None)


async def test_a_look_leaves_no_trace_of_a_client() -> None:
    buckets = MemoryBuckets(60, 2)
    assert [await buckets.peek(key) for key in "abc"] == [0, 0, 0]
    assert len(buckets) == 0
    await buckets.take("a")
    await buckets.close()
    assert len(buckets) == 1


@pytest.mark.parametrize(
    ("wait", "believed"),
    [(None, True), (0.0, True), (1.9, True), (2.1, False), (-0.1, False), (float("nan"), False)],
)
def test_a_shared_bucket_is_believed_a_wait_that_it_can_have(wait, believed: bool) -> None:
    """Of sixty requests a minute, a second, and one more because clocks step."""
    errors = list[int]()
    buckets = SharedBuckets("redis://localhost", 60, 9, on_error=lambda: errors.append(1))
    assert buckets._believed(wait) == (wait if believed else None)
    assert len(errors) == (not believed)
