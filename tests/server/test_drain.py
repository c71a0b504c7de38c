"""The drain: when it has begun, what is left of its time, and whether everybody was served."""

import asyncio

import pytest

from smart_embedder.server import drain as module
from smart_embedder.server.drain import Drain
from tests.support.skipped_time import in_skipped_time, now, turns


@pytest.fixture(autouse=True)
def clock(monkeypatch) -> None:
    """The time of a drain is that of the loop."""
    monkeypatch.setattr(module.time, "monotonic", now)


@in_skipped_time
async def test_its_time_runs_from_its_beginning_and_begins_once() -> None:
    drain = Drain()
    await asyncio.sleep(100)
    assert (drain.begun, drain.announced, drain.seconds_left(30)) == (False, False, 30)
    drain.begin()
    assert (drain.begun, drain.announced) == (True, True)
    await asyncio.sleep(10)
    drain.begin()
    assert drain.seconds_left(30) == pytest.approx(20, abs=0.01)
    await asyncio.sleep(100)
    assert drain.seconds_left(30) == 0


@in_skipped_time
async def test_it_is_over_when_the_last_accepted_request_has_its_answer() -> None:
    drain, ended = Drain(), list[bool]()
    assert await drain.wait(10)

    async def serve(seconds: float) -> None:
        with drain.track():
            await asyncio.sleep(seconds)

    served = [asyncio.create_task(serve(seconds)) for seconds in (1, 5, 3)]
    await turns()
    waits = asyncio.create_task(drain.wait(10))
    waits.add_done_callback(lambda task: ended.append(task.result()))
    await asyncio.sleep(4)
    assert ended == []
    await asyncio.sleep(1.1)
    assert ended == [True]
    await asyncio.gather(*served)


@in_skipped_time
async def test_a_request_that_is_not_answered_in_time_is_told_of_and_failed() -> None:
    drain, failed = Drain(), list[int]()
    for number in range(2):
        drain.on_timeout(lambda number=number: failed.append(number))
    began = now()
    with drain.track():
        assert not await drain.wait(10)
    assert now() - began == pytest.approx(10, abs=0.1)
    assert failed == []
    drain.time_out()
    assert failed == [0, 1]


@in_skipped_time
async def test_streams_are_woken_when_they_are_to_end() -> None:
    drain = Drain()
    waits = asyncio.create_task(drain.wait_for_beginning())
    drain.begin()
    await turns()
    assert not waits.done()
    drain.wake()
    await turns()
    assert waits.done()
