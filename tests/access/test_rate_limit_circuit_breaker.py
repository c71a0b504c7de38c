"""A store that fails is asked by one caller a second, and costs nobody more than its timeout."""

import asyncio

import pytest
from structlog.testing import capture_logs

from smart_embedder.access import rate_limit
from smart_embedder.access.rate_limit import REDIS_PAUSE, REDIS_TIMEOUT, CircuitBreaker
from tests.support.skipped_time import in_skipped_time, now, turns


@pytest.fixture(autouse=True)
def clock(monkeypatch) -> None:
    """The pauses are those of the loop's time."""
    monkeypatch.setattr(rate_limit.time, "monotonic", now)


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


@in_skipped_time
async def test_a_store_that_answers_is_asked_by_all_and_by_a_few_at_once() -> None:
    store = Store()
    store.seconds = 0.2
    with capture_logs() as log:
        assert await store.calls(100) == [7] * 100
    assert (store.asked, store.most_at_once, store.failures, log) == (100, 16, 0, [])


@in_skipped_time
async def test_a_failure_is_counted_and_nobody_asks_in_the_pause_after_it() -> None:
    store = Store()
    store.error = OSError("gone")
    assert await store.call() is None
    assert (store.asked, store.failures) == (1, 1)
    await asyncio.sleep(REDIS_PAUSE - 0.01)
    assert await store.calls(100) == [None] * 100
    assert (store.asked, store.failures) == (1, 1)


@in_skipped_time
async def test_after_the_pause_one_asks_while_the_others_still_have_no_answer() -> None:
    store = Store()
    store.error = OSError("gone")
    await store.call()
    for count in (2, 3):
        await asyncio.sleep(REDIS_PAUSE + 0.01)
        assert await store.calls(50) == [None] * 50
        assert (store.asked, store.failures) == (count, count)
    store.error, store.seconds = None, 0.1
    await asyncio.sleep(REDIS_PAUSE + 0.01)
    answers = await store.calls(50)
    assert answers.count(7) >= 1
    assert answers.count(None) >= 15, "they did not wait for the one that tries"
    assert await store.calls(50) == [7] * 50


@in_skipped_time
async def test_who_tries_again_and_takes_long_keeps_the_others_from_trying_too() -> None:
    store = Store()
    store.error = OSError("gone")
    await store.call()
    store.seconds = 0.2
    await asyncio.sleep(REDIS_PAUSE + 0.01)
    tries = asyncio.create_task(store.call())
    await turns()
    assert await store.calls(5) == [None] * 5
    await tries
    assert store.asked == 2


@in_skipped_time
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


@pytest.mark.parametrize("error", [KeyError, OSError, RuntimeError, TypeError, ValueError])
def test_the_errors_of_a_store_are_no_answer(error: type[Exception]) -> None:
    @in_skipped_time
    async def fail() -> None:
        store = Store()
        store.error = error("odd")
        assert await store.call() is None

    fail()


@in_skipped_time
async def test_any_other_error_is_the_callers() -> None:
    store = Store()
    store.error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        await store.call()
    assert store.failures == 0


@in_skipped_time
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
