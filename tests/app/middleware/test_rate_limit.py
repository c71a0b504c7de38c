"""Token buckets match a plain reference."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import RateLimitedError
from app.middleware.rate_limit import TokenBuckets, TokenLimits, TokenTerms


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
    burst=st.integers(1, 8) | st.just(200),
    start=st.integers(0, 2**62),
    steps=st.lists(st.integers(0, 10 * 10**9), max_size=60),
)
@settings(max_examples=50)
def test_every_wait_is_that_of_a_textbook_token_bucket(
    requests_per_minute: int, burst: int, start: int, steps: list[int]
) -> None:
    """Begins with a burst while the clock stands still."""
    buckets = TokenBuckets(requests_per_minute, burst)
    reference = ReferenceBucket(requests_per_minute, burst, start)
    now = start
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("app.middleware.rate_limit.monotonic_ns", lambda: now)
        for step in [0] * burst + [0, -(-60 * 10**9 // requests_per_minute), *steps]:
            now += step
            expected = float(reference.take(now) / 10**9)
            assert buckets.peek("key") == buckets.take("key") == expected


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


def test_several_are_allowed_where_one_is_and_delay_those_that_follow(monkeypatch) -> None:
    now = 0
    monkeypatch.setattr("app.middleware.rate_limit.monotonic_ns", lambda: now)
    buckets = TokenBuckets(60, 60)
    assert buckets.state("key") == (60, 0)
    assert buckets.take("key", 59) == 0
    assert buckets.state("key") == (1, 59)
    assert buckets.take("key", 100) == 0
    # 99 too many, and one that must be there.
    assert buckets.peek("key") == 100
    assert buckets.state("key") == (0, 159)
    now = 100 * 10**9
    assert buckets.take("key", 1) == 0


def test_limits_of_a_named_token_refuse_each_by_its_unit(monkeypatch) -> None:
    monkeypatch.setattr("app.middleware.rate_limit.monotonic_ns", lambda: 0)
    limits = TokenLimits("alice", TokenTerms(requests_per_minute=3, tokens_per_minute=100))
    assert limits.headers() == [
        (b"ratelimit-policy", b'"requests";q=3;w=60, "tokens";q=100;w=60'),
        (b"ratelimit", b'"requests";r=3;t=0, "tokens";r=100;t=0'),
    ]
    assert limits.accept_request() is None
    limits.charge(130)
    assert dict(limits.headers())[b"ratelimit"] == b'"requests";r=2;t=20, "tokens";r=0;t=78'
    refused = limits.accept_request()
    assert str(refused) == (
        "too many tokens: 100 a minute are allowed (tokens_per_minute of alice in "
        "API_TOKENS_FILE); try again in 19 s"
    )
    # A request that was accepted before the tokens were gone.
    with pytest.raises(RateLimitedError, match="too many tokens"):
        limits.charge(1)
    only_requests = TokenLimits("bob", TokenTerms(requests_per_minute=1, weight=2))
    only_requests.charge(1_000_000)
    assert only_requests.accept_request() is None
    refused = only_requests.accept_request()
    assert refused is not None
    assert refused.retry_after == 60
    assert "requests_per_minute of bob" in str(refused)
    assert TokenLimits("carol", TokenTerms(weight=2)).headers() == []
