"""How slowly a body may come."""

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from smart_embedder.errors import BodyStalledError
from smart_embedder.middleware.memory import MIN_BYTES_PER_SECOND, Reservation, TimedBody
from tests.support.skipped_time import in_skipped_time, now, turns

WINDOW = 10.0
ENOUGH = int(MIN_BYTES_PER_SECOND * WINDOW)
Parts = Iterable[tuple[float, int]]


def arriving(parts: Parts, *, whole: bool = False) -> Any:
    """A body whose parts come after so many seconds each; then nothing, or what follows it."""
    left = list(parts)
    inbox = asyncio.Queue[dict[str, Any]]()

    async def arrive() -> None:
        for number, (seconds, size) in enumerate(left):
            await asyncio.sleep(seconds)
            more = not whole or number + 1 < len(left)
            inbox.put_nowait({"type": "http.request", "body": b"x" * size, "more_body": more})

    inbox.arriving = asyncio.create_task(arrive())  # type: ignore[attr-defined]
    return inbox.get


def body_of(parts: Parts, *, whole: bool = False) -> TimedBody:
    return TimedBody(arriving(parts, whole=whole), Reservation("a client"), WINDOW)


async def seconds_until_refused(*parts: tuple[float, int]) -> float:
    began, body = now(), body_of(parts)
    with pytest.raises(BodyStalledError, match="10 s must bring the rest of it, or 1024 bytes"):
        await read_on(body)
    return now() - began


async def read_on(body: TimedBody) -> None:
    while True:
        await body.receive()


@in_skipped_time
async def test_a_body_that_does_not_come_is_refused_when_its_time_is_over() -> None:
    assert await seconds_until_refused() == pytest.approx(WINDOW, abs=0.3)
    assert await seconds_until_refused((1, ENOUGH - 1)) == pytest.approx(WINDOW, abs=0.3)


@in_skipped_time
async def test_each_window_must_bring_its_bytes() -> None:
    # The first message after the end of a window ends it: it may bring what was missing.
    steady = [(0.5, ENOUGH // 20)] * 60
    assert await seconds_until_refused(*steady) == pytest.approx(40, abs=1)
    trickle = [(1.0, ENOUGH // 20)] * 60
    assert await seconds_until_refused(*trickle) == pytest.approx(WINDOW, abs=1)
    # What one window has too much is not there for the next.
    assert await seconds_until_refused((9.9, 5 * ENOUGH), (0.2, 1)) == pytest.approx(20.2, abs=0.3)


@in_skipped_time
async def test_the_rest_of_a_body_is_enough_however_small_and_what_follows_has_all_time() -> None:
    body = body_of([(9.9, 1), (0.2, 1)], whole=True)
    await body.receive()
    assert not body.complete
    assert (await body.receive())["body"] == b"x"
    assert body.complete
    follows = asyncio.create_task(body.receive())
    await asyncio.sleep(1000)
    assert not follows.done()
    follows.cancel()


@in_skipped_time
async def test_what_has_arrived_while_the_process_was_stopped_is_read() -> None:
    body = body_of([(WINDOW + 0.2, ENOUGH)])
    assert len((await body.receive())["body"]) == ENOUGH
    body = body_of([(WINDOW + 0.3, ENOUGH)])
    with pytest.raises(BodyStalledError):
        await body.receive()


@in_skipped_time
async def test_where_memory_is_short_its_time_is_over_at_once() -> None:
    body, began = body_of([]), now()
    receives = asyncio.create_task(body.receive())
    await turns()
    body._held.evict()
    with pytest.raises(BodyStalledError, match="while memory was short"):
        await receives
    assert now() - began < 0.3
    with pytest.raises(BodyStalledError, match="while memory was short"):
        await body.receive()
