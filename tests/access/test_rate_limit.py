"""Token buckets in memory: they match a plain reference, and their number is bounded."""

import asyncio
import sys
from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.access.rate_limit import MemoryBuckets, SharedBuckets
from app.errors import StartupError


@dataclass
class Clock:
    """Stands in for the machine's clock."""

    now: float = 1000.0

    def read(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def clock():
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr("throttled.utils.now_mono_f", clock.read)
        yield clock


class ReferenceBucket:
    """A textbook token bucket, refilled continuously up to the burst."""

    def __init__(self, requests_per_minute: int, burst: int, now: float) -> None:
        self.rate = Fraction(requests_per_minute, 60)
        self.burst = burst
        self.tokens = Fraction(burst)
        self.updated = Fraction(now)

    def take(self, now: float) -> Fraction:
        gained = (Fraction(now) - self.updated) * self.rate
        self.tokens = min(Fraction(self.burst), self.tokens + gained)
        self.updated = Fraction(now)
        if self.tokens >= 1:
            self.tokens -= 1
            return Fraction(0)
        return (1 - self.tokens) / self.rate


# Rates and steps that a float holds exactly, so that both sides meet each border at once.
@given(
    requests_per_minute=st.sampled_from([15, 30, 60, 120, 240, 3840]),
    burst=st.integers(1, 8),
    steps=st.lists(st.integers(0, 2048).map(lambda step: step / 256), max_size=60),
)
async def test_every_answer_is_that_of_the_textbook_bucket(
    clock: Clock, requests_per_minute: int, burst: int, steps: list[float]
) -> None:
    buckets = MemoryBuckets(requests_per_minute, burst)
    reference = ReferenceBucket(requests_per_minute, burst, clock.now)
    for step in steps:
        clock.now += step
        assert await buckets.take("key") == reference.take(clock.now)


async def test_the_defaults_admit_120_at_once_and_then_60_a_second(clock: Clock) -> None:
    buckets = MemoryBuckets(3600, 120)
    waits = [await buckets.take("key") for _ in range(121)]
    assert waits[:119] == [0] * 119
    # 120 sixtieths are rounded 120 times: the last of the burst may have to wait for the rest.
    assert waits[119] == pytest.approx(0, abs=1e-6)
    assert waits[120] == pytest.approx(1 / 60 if waits[119] == 0 else 0, abs=1e-6)
    admitted = 0
    for _ in range(1000):
        clock.now += 0.01
        admitted += await buckets.take("key") == 0
    assert admitted == pytest.approx(600, abs=1)


@pytest.mark.parametrize("requests_per_minute", [1, 7, 100, 3600])
async def test_the_wait_is_the_real_one(clock: Clock, requests_per_minute: int) -> None:
    buckets = MemoryBuckets(requests_per_minute, 1)
    assert await buckets.take("key") == 0
    wait = await buckets.take("key")
    assert wait == pytest.approx(60 / requests_per_minute)
    clock.now += wait - 0.001
    assert await buckets.take("key") == pytest.approx(0.001)
    clock.now += 0.0011
    assert await buckets.take("key") == 0


async def test_requests_at_once_get_the_burst_and_no_more() -> None:
    buckets = MemoryBuckets(1, 50)
    waits = await asyncio.gather(*(buckets.take("key") for _ in range(1000)))
    assert waits.count(0) == 50
    assert await buckets.take("another") == 0


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
