"""Token buckets match a plain reference."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.middleware.rate_limit import TokenBuckets


@dataclass
class Clock:
    """A fake clock, in nanoseconds."""

    now: int = 1000 * 10**9

    def read(self) -> int:
        return self.now


@contextmanager
def stopped_clock() -> Iterator[Clock]:
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr("app.middleware.rate_limit.monotonic_ns", clock.read)
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
def test_every_wait_is_that_of_a_textbook_token_bucket(
    requests_per_minute: int, burst: int, start: int, steps: list[int]
) -> None:
    buckets = TokenBuckets(requests_per_minute, burst)
    reference = ReferenceBucket(requests_per_minute, burst, start)
    with stopped_clock() as clock:
        clock.now = start
        for step in steps:
            clock.now += step
            expected = reference.take(clock.now)
            assert buckets.take("key") == float(expected / 10**9)


# With a coarse clock, which stands still, sums of rounded intervals are one too large.
@given(
    requests_per_minute=st.integers(1, 10_000),
    burst=st.integers(1, 200),
    now=st.integers(0, 2**62),
)
def test_a_burst_has_exactly_that_many_requests_at_any_time(
    requests_per_minute: int, burst: int, now: int
) -> None:
    buckets = TokenBuckets(requests_per_minute, burst)
    with stopped_clock() as clock:
        clock.now = now
        assert [buckets.take("key") for _ in range(burst)] == [0] * burst
        one_token = 60 / requests_per_minute
        assert buckets.peek("key") == buckets.take("key") == one_token
        clock.now += -(-60 * 10**9 // requests_per_minute)  # Rounded up.
        assert [buckets.peek("key"), buckets.take("key")] == [0, 0]
        assert buckets.take("key") > 0


def test_the_least_recently_seen_client_is_forgotten() -> None:
    buckets = TokenBuckets(1, 1, max_clients=3)
    assert [buckets.peek(key) for key in "abc"] == [0, 0, 0]
    assert len(buckets) == 0, "peek stores nothing"
    for key in "abc":
        assert buckets.take(key) == 0
    assert buckets.take("a") > 0
    assert buckets.take("d") == 0
    assert buckets.take("a") > 0, "a was seen last, although it was refused"
    assert buckets.take("b") == 0, "b was forgotten"
    assert len(buckets) == 3
