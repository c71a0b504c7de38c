"""How slowly a body may come; the limit hits the client that causes it."""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest

from smart_embedder.api.context import NATIVE_EMBEDDINGS, RequestContext
from smart_embedder.errors import (
    BodyStalledError,
    BodyTooLargeError,
    InvalidRequestError,
    QueueFullError,
)
from smart_embedder.middleware.memory import (
    MIN_BYTES_PER_SECOND,
    BodyMemory,
    Exchange,
    HeldAnswer,
    LimitMemory,
    Reservation,
    ResponseMemory,
    TimedBody,
    fit_to_memory,
)
from tests.middleware.exchange import part_of
from tests.support.skipped_time import in_skipped_time, now, turns

MIB = 1 << 20
HELD = 16 * MIB
PATIENCE = 90.0
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


async def read_on(body: TimedBody) -> None:
    while True:
        await body.receive()


@pytest.mark.parametrize(
    ("parts", "seconds"),
    [
        pytest.param([], WINDOW, id="nothing"),
        pytest.param([(1, ENOUGH - 1)], WINDOW, id="a byte too few"),
        # The first message after the end of a window ends it: it may bring what was missing.
        pytest.param([(0.5, ENOUGH // 20)] * 60, 40, id="enough for three windows"),
        pytest.param([(1.0, ENOUGH // 20)] * 60, WINDOW, id="half of what is enough"),
        # What one window has too much is not there for the next.
        pytest.param([(9.9, 5 * ENOUGH), (0.2, 1)], 20.2, id="all at the end of a window"),
    ],
)
@in_skipped_time
async def test_each_window_must_bring_its_bytes_or_the_body_is_refused(parts, seconds) -> None:
    began, body = now(), body_of(parts)
    with pytest.raises(BodyStalledError, match="10 s must bring the rest of it, or 1024 bytes"):
        await read_on(body)
    assert now() - began == pytest.approx(seconds, abs=1)


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


# What all requests hold.


def scope(client: str = "192.0.2.1", abort: Callable[[], None] | None = None) -> dict:
    context = RequestContext("id", "/embeddings/", NATIVE_EMBEDDINGS, client)
    return {"type": "http", "state": {"context": context, "abort_connection": abort}}


async def send(_message) -> None:
    """A client that reads everything."""


def receiving(*sizes: int, complete: bool = True):
    """A body of parts of these sizes; an incomplete one then stalls."""
    left = list(sizes)

    async def receive():
        if not left:
            await asyncio.get_running_loop().create_future()
        size = left.pop(0)
        return part_of({"body": b"x" * size, "more_body": bool(left) or not complete})

    return receive


async def read_whole(_scope, receive, _send) -> None:
    while (await receive()).get("more_body"):
        pass


def limited(app, max_bytes: int = HELD, answer_bytes: int = HELD, **options) -> LimitMemory:
    """The middleware with as much room for answers as for bodies."""
    memory = BodyMemory(max_bytes), ResponseMemory(max_bytes)
    return LimitMemory(app, *memory, answer_bytes=answer_bytes, **options)


def take(bodies: BodyMemory, count: int, client: str, size: int = MIB) -> None:
    """Hold `count` bodies of one client in work."""
    for _ in range(count):
        bodies.reserve(Reservation(client), size)


@in_skipped_time
async def test_one_client_cannot_fill_the_memory_and_alone_has_three_quarters() -> None:
    """In one large body or in many."""
    bodies = BodyMemory(HELD)
    with pytest.raises(QueueFullError, match="hold 0 bytes, 0 of them from this client"):
        take(bodies, 1, "a", size=12 * MIB + 1)
    take(bodies, 12, "a")
    with pytest.raises(QueueFullError, match="16 times MAX_BODY_BYTES") as refused:
        take(bodies, 1, "a")
    assert refused.value.retry_after == 1
    take(bodies, 10, "a", size=1000)
    take(bodies, 2, "b")
    with pytest.raises(QueueFullError):
        take(bodies, 2, "b")
    take(bodies, 1, "c", size=1000)


def test_what_requests_hold_is_a_part_of_the_memory_that_is_left() -> None:
    bodies, responses = BodyMemory(2 * MIB), ResponseMemory(20 * MIB)
    fit_to_memory(bodies, responses, 240 * MIB)
    assert (bodies.max_bytes, responses.max_bytes) == (2 * MIB, 20 * MIB)
    fit_to_memory(bodies, responses, 60 * MIB)
    assert (bodies.max_bytes, responses.max_bytes) == (MIB, 5 * MIB)
    assert (bodies.most_of_one, responses.most_of_one) == (3 * MIB // 4, 15 * MIB // 4)


async def test_a_body_or_an_answer_that_the_memory_never_has_room_for_is_no_case_for_retries() -> (
    None
):
    limit = limited(read_whole, max_bytes=4 * MIB)
    await limit(scope(), receiving(2 * MIB, MIB), send)
    with pytest.raises(BodyTooLargeError, match=f"more than {3 * MIB} bytes, for which the memory"):
        await limit(scope(), receiving(2 * MIB, MIB, 1), send)
    answer = HeldAnswer(limit.responses, "a", 16 * MIB)
    answer.need(3 * MIB, "vectors", "send fewer")
    with pytest.raises(InvalidRequestError, match=f"this answer may hold {3 * MIB}"):
        answer.need(3 * MIB + 1, "vectors", "send fewer")


async def test_a_request_without_a_body_is_never_refused() -> None:
    limit = limited(read_whole, 0)
    await limit(scope(), receiving(0), send)
    with pytest.raises(QueueFullError):
        await limit(scope(), receiving(1), send)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_body_counts_until_its_answer_begins_or_it_fails(fails: bool) -> None:
    async def answer(scope, receive, send) -> None:
        await read_whole(scope, receive, send)
        limit.app = read_whole
        if fails:
            raise RuntimeError
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await limit(scope, receiving(10 * MIB), send)

    limit = limited(answer)
    with pytest.raises(RuntimeError) if fails else nullcontext():
        await limit(scope(), receiving(10 * MIB), send)
    await limit(scope(), receiving(10 * MIB), send)


async def test_a_body_that_does_not_come_is_refused_after_its_window() -> None:
    limit = limited(read_whole, body_seconds=0.05)
    with pytest.raises(BodyStalledError, match="too slowly"):
        await limit(scope(), receiving(10, complete=False), send)


class Reader(Reservation):
    """A response, and whether it was evicted."""

    def __init__(self, client: str) -> None:
        self.evicted = False
        super().__init__(client, self._evict)

    def _evict(self) -> None:
        self.evicted = True


@pytest.mark.parametrize("read", [0, 100], ids=["unread", "in a trickle"])
@in_skipped_time
async def test_of_two_responses_that_are_too_many_the_one_that_is_not_read_is_evicted(
    read: int,
) -> None:
    responses = ResponseMemory(HELD)
    idle, reading = Reader("a"), Reader("b")
    for each in (idle, reading):
        responses.hold(each, 14 * MIB)
    for _ in range(2):
        assert not idle.evicted, "its client has a second to begin"
        await asyncio.sleep(0.5)
        for each, size in ((idle, read), (reading, 300_000)):
            if size:
                responses.release(each, size)
                each.record_progress(size)
    assert (idle.evicted, reading.evicted) == (True, False)


@pytest.mark.parametrize(
    ("held", "more", "is_refused", "evicted"),
    [
        pytest.param([("a", 14)], ("b", 1), False, "", id="there is room"),
        pytest.param([("a", 14)], ("b", 3), False, "a", id="there is none"),
        pytest.param([("a", 4), *[("b", 4)] * 3], ("c", 1), False, "b", id="who holds most"),
        pytest.param([("a", 6), ("b", 1)], ("a", 6), False, "a", id="who is over its own share"),
        pytest.param([("a", 1)], ("b", 15), True, "", id="over its share alone"),
        pytest.param([("a", 1)], ("b", 15.1), True, "a", id="over its share and all"),
        pytest.param([("in work", 14)], ("b", 2.1), True, "", id="never one in work"),
    ],
)
@in_skipped_time
async def test_whoever_has_made_no_progress_for_a_second_is_evicted_where_there_is_no_room(
    held, more, is_refused: bool, evicted: str
) -> None:
    bodies = BodyMemory(HELD)
    readers = [Reader(client) for client, _ in held]
    for reader, (client, size) in zip(readers, held, strict=True):
        bodies.hold(reader, size * MIB)
        if client == "in work":
            reader.evict = None
    await asyncio.sleep(60)
    with pytest.raises(QueueFullError) if is_refused else nullcontext():
        bodies.reserve(Reservation(more[0]), int(more[1] * MIB))
    assert [each.client for each in readers if each.evicted] == [*evicted]


ADVICE = ("the vectors", "send fewer texts")


def answer_of(responses: ResponseMemory, client: str, allowed: int = 4 * MIB) -> HeldAnswer:
    return HeldAnswer(responses, client, allowed)


@in_skipped_time
async def test_an_answer_may_hold_more_where_its_body_is_large() -> None:
    answer = answer_of(ResponseMemory(HELD), "a", MIB)
    answer.need(MIB, *ADVICE)
    with pytest.raises(InvalidRequestError, match="need 1048577 bytes, and this answer may hold"):
        answer.need(MIB + 1, *ADVICE)
    answer.body_bytes = 100_000
    answer.need(2 * MIB - 100_000, *ADVICE)
    with pytest.raises(InvalidRequestError, match="MAX_ANSWER_BYTES"):
        answer.need_more(200_000, *ADVICE)


@in_skipped_time
async def test_an_answer_to_come_is_refused_where_others_leave_no_room() -> None:
    responses = ResponseMemory(HELD)
    for _ in range(3):
        answer_of(responses, "a").need(4 * MIB, *ADVICE)
    with pytest.raises(QueueFullError, match="answers in work hold") as refused:
        answer_of(responses, "a").need(4 * MIB, *ADVICE)
    assert refused.value.retry_after == 1
    answer_of(responses, "b").need(3 * MIB, *ADVICE)
    answer_of(responses, "a").need(MIB, *ADVICE)


@in_skipped_time
async def test_what_others_need_of_its_work_after_its_end_is_not_held_for_it() -> None:
    """Work that several requests share goes on when the one that began it has left."""
    responses = ResponseMemory(HELD)
    answer = answer_of(responses, "a")
    answer.need(MIB, *ADVICE)
    answer.release()
    answer.need(2 * MIB, *ADVICE)
    assert responses._total == 0
    with pytest.raises(InvalidRequestError):
        answer.need(5 * MIB, *ADVICE)


@pytest.mark.parametrize(
    ("length", "sent", "others"),
    [
        pytest.param(None, 30 * MIB, 4 * MIB, id="held whole until its end"),
        pytest.param(10 * MIB, 9 * MIB, 11 * MIB, id="rendered whole, and freed as it is sent"),
    ],
)
@in_skipped_time
async def test_an_answer_is_held_once_however_often_it_is_needed_and_its_end_frees_it(
    length: int | None, sent: int, others: int
) -> None:
    responses = ResponseMemory(HELD)
    answer, other = answer_of(responses, "a", 12 * MIB), answer_of(responses, "b", HELD)
    for size in (6, 12, 9):
        answer.need(size * MIB, *ADVICE)
    answer.begin(length)
    answer.sent(sent)
    with pytest.raises(QueueFullError) if length is None else nullcontext():
        other.need(others, *ADVICE)
    answer.release()
    other.need(others, *ADVICE)


@in_skipped_time
async def test_an_answer_is_evicted_only_while_it_waits_unread() -> None:
    """One that took long to make has its time, too."""
    responses, evicted = ResponseMemory(HELD), []
    answers = [
        HeldAnswer(responses, name, 12 * MIB, lambda name=name: evicted.append(name))
        for name in "ab"
    ]
    for answer in answers:
        answer.need(6 * MIB, *ADVICE)
    for begun in (False, True):
        await asyncio.sleep(60)
        for answer in answers * begun:
            answer.begin(None)
        with pytest.raises(QueueFullError):
            answer_of(responses, "c", HELD).need(6 * MIB, *ADVICE)
    for _ in range(3):
        await asyncio.sleep(0.9)
        answers[0].sent(16_384)
    answer_of(responses, "c", HELD).need(6 * MIB, *ADVICE)
    assert evicted == ["b"]


@in_skipped_time
async def test_an_upload_that_goes_on_is_not_evicted_and_one_that_stalls_is() -> None:
    bodies, uploads = BodyMemory(HELD), [Reader("a"), Reader("b")]
    for each in uploads:
        bodies.reserve(each, 6 * MIB)
    for _ in range(3):
        await asyncio.sleep(0.9)
        bodies.reserve(uploads[0], 16_384)
        bodies.reserve(uploads[1], 16)
    bodies.reserve(Reservation("c"), 6 * MIB)
    assert [each.evicted for each in uploads] == [False, True]


@in_skipped_time
async def test_answers_that_are_too_many_are_looked_at_once_a_second_until_they_fit(
    monkeypatch,
) -> None:
    loop, timers = asyncio.get_running_loop(), list[float]()
    call_later = loop.call_later

    def counted(seconds: float, *call: Any, **options: Any) -> Any:
        timers.append(seconds)
        return call_later(seconds, *call, **options)

    monkeypatch.setattr(loop, "call_later", counted)
    responses = ResponseMemory(HELD)
    readers = [Reader(name) for name in "abcd"]
    for each in readers:
        responses.hold(each, 6 * MIB)
    assert timers == [1.0]
    await asyncio.sleep(1.1)
    assert [each.evicted for each in readers].count(True) == 2
    await asyncio.sleep(60)
    assert timers == [1.0, 1.1, 60], "of which the last two are this test's own"
    responses.hold(Reader("e"), 17 * MIB)
    assert timers[3:] == [1.0], "from now on it is looked at again"


@pytest.mark.parametrize("can_abort", [False, True])
async def test_a_request_in_work_is_cut_off_where_the_server_has_a_way_to(can_abort: bool) -> None:
    limit, aborted = limited(read_whole), list[bool]()
    abort = (lambda: aborted.append(True)) if can_abort else None
    exchange = Exchange(limit, scope(abort=abort), receiving(10), send)
    await exchange.receive()
    await exchange.send({"type": "http.response.start", "headers": []})
    evict = exchange._answer.reservation.evict
    assert (evict is not None) == can_abort
    if evict is not None:
        evict()
    assert aborted == [True] * can_abort
    exchange.release()


async def test_an_answer_is_refused_and_held_through_the_context_of_its_request() -> None:
    asked = []

    async def answer(scope, receive, _send) -> None:
        await read_whole(scope, receive, _send)
        memory = scope["state"]["context"].answer
        asked.append(memory.allowed)
        memory.need(memory.allowed, *ADVICE)
        with pytest.raises(QueueFullError):
            answer_of(limit.responses, "another", HELD).need(11 * MIB, *ADVICE)
        with pytest.raises(InvalidRequestError):
            memory.need(memory.allowed + 1, *ADVICE)

    limit = limited(answer, answer_bytes=4 * MIB)
    await limit(scope(), receiving(1000), send)
    assert asked == [4 * MIB + 10 * 1000]
    answer_of(limit.responses, "another", HELD).need(12 * MIB, *ADVICE)


@in_skipped_time
async def test_nothing_is_kept_of_a_client_that_holds_nothing() -> None:
    bodies = BodyMemory(HELD)
    held = [Reservation(f"client {i}") for i in range(3)]
    for each in held:
        bodies.reserve(each, 100)
    bodies.release(held[0], 100)
    bodies.release(held[1])
    assert list(bodies._by_client) == ["client 2"]
