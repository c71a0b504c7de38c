"""What a stream holds: it waits for room, and one that pauses makes room for others."""

import asyncio
from typing import Any

import pytest

from smart_embedder.api.context import EMBEDDING_STREAM, RequestContext
from smart_embedder.errors import BodyStalledError, InvalidRequestError, QueueFullError
from smart_embedder.middleware.memory import Exchange, Memory, Reservation
from tests.middleware.exchange import part_of
from tests.middleware.test_memory import MIB, PATIENCE, limited
from tests.support.skipped_time import in_skipped_time, now, turns


class Stream:
    """An exchange whose client sends what is put into `inbox`, and reads while `reads` is set."""

    def __init__(self, room: int = 16 * MIB, client: str = "192.0.2.1") -> None:
        # Its app is not called.
        self.limit = limited(self, room, 5 * MIB, stream_seconds=PATIENCE)
        self.bodies, self.responses = self.limit.bodies, self.limit.responses
        self.inbox = asyncio.Queue[tuple[int, bool]]()
        self.reads = asyncio.Event()
        self.reads.set()
        self.aborted = False
        self.sent = 0
        self.join(client)

    def join(self, client: str) -> None:
        self.context = RequestContext("id", "/embeddings/stream", EMBEDDING_STREAM, client)
        state = {"context": self.context, "abort_connection": self._abort}
        self.exchange = Exchange(
            self.limit, {"type": "http", "state": state}, self._receive, self._send
        )

    def _abort(self) -> None:
        self.aborted = True

    async def _receive(self) -> dict[str, Any]:
        size, more = await self.inbox.get()
        return part_of({"body": b"x" * size, "more_body": more})

    async def _send(self, _message: Any) -> None:
        await self.reads.wait()
        self.sent += 1

    async def receive(self, size: int, *, more: bool = True) -> int:
        """The size of a part that the client sends."""
        self.inbox.put_nowait((size, more))
        return len((await self.exchange.receive()).get("body", b""))


def another(memory: Memory, size: int) -> Reservation:
    """What another client holds."""
    held = Reservation("another", None)
    memory.reserve(held, size)
    return held


@in_skipped_time
async def test_what_a_stream_has_received_is_held_until_it_is_released() -> None:
    stream = Stream()
    for _ in range(2):
        assert await stream.receive(6 * MIB) == 6 * MIB
        with pytest.raises(QueueFullError):
            another(stream.bodies, 11 * MIB)
        stream.exchange.release_body(6 * MIB)
    another(stream.bodies, 11 * MIB)
    assert await stream.receive(0, more=False) == 0
    stream.exchange.release()


@pytest.mark.parametrize("freed", [True, False])
@in_skipped_time
async def test_without_room_it_waits_until_there_is_some_or_for_too_long(freed: bool) -> None:
    stream, began = Stream(), now()
    held = another(stream.bodies, 12 * MIB)
    receives = asyncio.create_task(stream.receive(6 * MIB))
    await asyncio.sleep(PATIENCE / 2)
    assert not receives.done()
    if freed:
        stream.bodies.release(held)
        assert await receives == 6 * MIB
    else:
        with pytest.raises(QueueFullError):
            await receives
        assert now() - began == pytest.approx(PATIENCE, abs=1)


@in_skipped_time
async def test_a_stream_has_its_patience_for_each_part_and_may_be_silent_after_its_end() -> None:
    stream, ended = Stream(), Stream()
    await ended.receive(10, more=False)
    waits = asyncio.create_task(ended.exchange.receive())
    for _ in range(3):
        await asyncio.sleep(PATIENCE - 1)
        await stream.receive(10)
    began = now()
    with pytest.raises(BodyStalledError, match=r"came for 90 seconds \(REQUEST_TIMEOUT\)"):
        await stream.exchange.receive()
    assert now() - began == pytest.approx(PATIENCE, abs=0.3)
    assert not waits.done()
    waits.cancel()


@in_skipped_time
async def test_where_memory_is_short_a_stream_that_pauses_is_evicted_and_told_so() -> None:
    stream = Stream()
    await stream.receive(10 * MIB)
    waits = asyncio.create_task(stream.exchange.receive())
    await turns()
    with pytest.raises(QueueFullError):
        another(stream.bodies, 10 * MIB)
    await asyncio.sleep(1.1)
    began = now()
    another(stream.bodies, 10 * MIB)
    with pytest.raises(BodyStalledError, match="while memory was short"):
        await waits
    assert now() - began < 0.1


@in_skipped_time
async def test_one_whose_time_is_over_at_that_moment_does_no_harm_to_who_needs_the_memory() -> None:
    stream, held = Stream(), list[Reservation]()
    await stream.receive(10 * MIB)
    waits = asyncio.create_task(stream.exchange.receive())
    await turns()
    asyncio.get_running_loop().call_later(
        PATIENCE, lambda: held.append(another(stream.bodies, 10 * MIB))
    )
    with pytest.raises(BodyStalledError):
        await waits
    assert [each.size for each in held] == [10 * MIB]


@in_skipped_time
async def test_a_stream_that_is_worked_on_is_not_evicted_and_its_time_begins_when_it_waits() -> (
    None
):
    stream = Stream()
    await stream.receive(10 * MIB)
    await asyncio.sleep(1000)
    with pytest.raises(QueueFullError):
        another(stream.bodies, 10 * MIB)
    waits = asyncio.create_task(stream.exchange.receive())
    await asyncio.sleep(0.9)
    with pytest.raises(QueueFullError):
        another(stream.bodies, 10 * MIB)
    stream.inbox.put_nowait((10, True))
    await waits
    await asyncio.sleep(1000)
    with pytest.raises(QueueFullError):
        another(stream.bodies, 10 * MIB)


@in_skipped_time
async def test_vectors_count_until_they_are_sent_and_unread_ones_are_cut_off() -> None:
    stream, rival = Stream(), Reservation("another", None)
    stream.exchange.hold_vectors(10 * MIB)
    with pytest.raises(QueueFullError):
        stream.responses.reserve(rival, 8 * MIB)
    stream.exchange.release_vectors(6 * MIB)
    stream.responses.reserve(rival, 8 * MIB)
    stream.responses.release(rival)
    stream.exchange.hold_vectors(6 * MIB)
    await stream.exchange.send({"type": "http.response.body", "body": b"x"})
    await asyncio.sleep(1000)
    with pytest.raises(QueueFullError):
        stream.responses.reserve(rival, 8 * MIB)
    assert not stream.aborted, "it computes, and its client has nothing to read"
    stream.reads.clear()
    sends = asyncio.create_task(stream.exchange.send({"type": "http.response.body"}))
    await asyncio.sleep(0.9)
    with pytest.raises(QueueFullError):
        stream.responses.reserve(rival, 8 * MIB)
    await asyncio.sleep(0.2)
    stream.responses.reserve(rival, 8 * MIB)
    assert stream.aborted
    sends.cancel()


@in_skipped_time
async def test_a_stream_and_the_other_requests_of_its_client_have_one_share() -> None:
    stream = Stream()
    stream.exchange.hold_vectors(10 * MIB)
    await stream.receive(10 * MIB)
    own = stream.context.client
    with pytest.raises(QueueFullError):
        stream.responses.reserve(Reservation(own, None), 4 * MIB)
    with pytest.raises(QueueFullError):
        stream.bodies.reserve(Reservation(own, None), 4 * MIB)
    stream.responses.reserve(Reservation("another", None), 4 * MIB)
    another(stream.bodies, 4 * MIB)
    stream.exchange.release()
    for memory in (stream.bodies, stream.responses):
        another(memory, 8 * MIB)


@in_skipped_time
async def test_one_piece_may_not_hold_more_than_an_answer() -> None:
    stream = Stream()
    assert stream.context.memory is stream.exchange
    stream.context.answer.check(5 * MIB, "vectors", "less")
    with pytest.raises(InvalidRequestError):
        stream.context.answer.check(5 * MIB + 1, "vectors", "less")
