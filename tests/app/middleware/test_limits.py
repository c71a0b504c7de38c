"""Limits of requests: memory, the speed of a body, and its size."""

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from app.context import NATIVE_EMBEDDINGS, RequestContext
from app.errors import BodyStalledError, BodyTooLargeError
from app.middleware.limits import (
    MIN_BYTES_PER_SECOND,
    HeldMemory,
    LimitBody,
    LimitMemory,
    MemoryBudget,
    TimedBody,
)
from smart_embedder.errors import InvalidRequestError, QueueFullError
from smart_embedder.requests import ANSWER_BYTES
from tests.app.middleware.exchange import Inner, body_message, exchange
from tests.support.skipped_time import in_skipped_time, now

MIB = 1 << 20
BUDGET = 64 * MIB
ADVICE = "the vectors", "send fewer texts"
WINDOW = 10.0
ENOUGH = int(MIN_BYTES_PER_SECOND * WINDOW)
Parts = Iterable[tuple[float, int]]


# The budget.


def held(budget: MemoryBudget, client: str = "a", *, body: int = 0, answer: int = 0) -> HeldMemory:
    """A request that holds memory for a body, then for its texts and its answer."""
    request = HeldMemory(budget, client)
    if body:
        request.add_body(body)
    if answer:
        request.reserve(answer, *ADVICE)
    return request


def test_bodies_hold_half_of_the_budget_and_answers_all_of_it() -> None:
    budget = MemoryBudget(BUDGET)
    for client in "abcdefgh":
        while True:
            try:
                held(budget, client, body=MIB)
            except QueueFullError:
                break
    assert budget.held == budget.bodies.held == BUDGET // 2
    held(budget, "a", answer=16 * MIB)
    assert (budget.held, budget.bodies.held) == (3 * BUDGET // 4, BUDGET // 2)


def test_a_client_holds_at_most_three_times_what_is_free_so_that_a_new_client_finds_memory() -> (
    None
):
    budget = MemoryBudget(BUDGET)
    requests = [held(budget, "a", answer=MIB) for _ in range(48)]
    with pytest.raises(QueueFullError, match="three times|3 times what is free") as refused:
        held(budget, "a", answer=MIB)
    assert refused.value.retry_after == 1
    for _ in range(12):
        held(budget, "b", answer=MIB)
    with pytest.raises(QueueFullError):
        held(budget, "b", answer=MIB)
    for client in "cdef":
        held(budget, client, answer=MIB)
    with pytest.raises(QueueFullError):
        held(budget, "g", answer=1)
    requests[0].release()
    held(budget, "g", answer=MIB)


def test_a_request_releases_its_body_when_it_reserves_memory_for_its_answer() -> None:
    budget = MemoryBudget(BUDGET)
    request = held(budget, body=10 * MIB)
    assert (budget.held, budget.bodies.held) == (10 * MIB, 10 * MIB)
    request.reserve(20 * MIB, *ADVICE)
    assert (budget.held, budget.bodies.held) == (30 * MIB, 0)
    for size in (5, 25):
        request.reserve(size * MIB, *ADVICE)
    assert budget.held == 35 * MIB, "the maximum that it has needed"
    request.release()
    request.release()
    assert (budget.held, budget.bodies.held) == (0, 0)


def test_a_request_without_memory_for_its_answer_is_refused_and_frees_its_body() -> None:
    budget = MemoryBudget(BUDGET)
    others = held(budget, "b", answer=30 * MIB)
    request = held(budget, body=4 * MIB)
    with pytest.raises(QueueFullError):
        request.reserve(26 * MIB, *ADVICE)
    request.release()
    assert budget.held == 30 * MIB
    others.release()
    held(budget, body=4 * MIB).reserve(26 * MIB, *ADVICE)


def test_memory_that_a_client_holds_already_is_never_refused() -> None:
    budget = MemoryBudget(BUDGET)
    request = held(budget, answer=40 * MIB // 2)
    held(budget, "b", answer=30 * MIB)
    request.reserve(20 * MIB, *ADVICE)


def test_an_answer_to_a_large_body_may_hold_more() -> None:
    budget = MemoryBudget(1 << 30)
    request = held(budget, answer=ANSWER_BYTES)
    with pytest.raises(InvalidRequestError, match="need 37748737 bytes, and this answer may hold"):
        request.reserve(ANSWER_BYTES + 1, *ADVICE)
    request.add_body(MIB)
    request.reserve(ANSWER_BYTES + 10 * MIB, *ADVICE)
    with pytest.raises(InvalidRequestError):
        request.reserve_more(1, *ADVICE)


def test_a_body_that_never_fits_is_413_and_not_503() -> None:
    budget = MemoryBudget(16 * MIB)
    with pytest.raises(BodyTooLargeError, match=f"more than {6 * MIB} bytes"):
        held(budget, body=6 * MIB + 1)
    request = held(budget, body=4 * MIB)
    with pytest.raises(InvalidRequestError, match=f"may hold {8 * MIB}"):
        request.reserve(8 * MIB + 1, *ADVICE)
    request.reserve(8 * MIB, *ADVICE)


def test_the_budget_follows_from_the_largest_body_and_the_free_memory() -> None:
    assert MemoryBudget.for_bodies_of(1000).max_bytes == 512 * MIB
    budget = MemoryBudget.for_bodies_of(32 * MIB)
    assert (budget.max_bytes, budget.bodies.max_bytes) == (1024 * MIB, 512 * MIB)
    budget.shrink_to(1 << 40)
    assert budget.max_bytes == 1024 * MIB
    budget.shrink_to(160 * MIB)
    assert (budget.max_bytes, budget.bodies.max_bytes) == (10 * MIB, 5 * MIB)


def test_clients_that_hold_no_memory_are_forgotten() -> None:
    budget = MemoryBudget(BUDGET)
    for number in range(3):
        request = held(budget, f"client {number}", body=100, answer=100)
        if number:
            request.release()
    assert [*budget._by_client] == ["client 0"]
    assert not budget.bodies._by_client


# The middleware.


def scope() -> dict[str, Any]:
    context = RequestContext("id", NATIVE_EMBEDDINGS.path, NATIVE_EMBEDDINGS, "192.0.2.1")
    return {"type": "http", "state": {"context": context}}


async def send(_message) -> None:
    """A client that reads everything."""


def receiving(*sizes: int):
    """A body of parts of these sizes."""
    remaining = list(sizes)

    async def receive():
        size = remaining.pop(0)
        return body_message({"body": b"x" * size, "more_body": bool(remaining)})

    return receive


@pytest.mark.parametrize("fails", [False, True])
async def test_a_request_holds_the_memory_of_its_body_and_answer_until_it_ends(fails: bool) -> None:
    seen = []

    async def app(scope, receive, send) -> None:
        while (await receive()).get("more_body"):
            pass
        answer = scope["state"]["context"].answer
        seen.append(budget.bodies.held)
        answer.reserve(5 * MIB, *ADVICE)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        seen.append(budget.held)
        if fails:
            raise RuntimeError

    budget = MemoryBudget(BUDGET)
    try:
        await LimitMemory(app, budget)(scope(), receiving(2 * MIB, MIB), send)
    except RuntimeError:
        assert fails
    assert seen == [3 * MIB, 8 * MIB]
    assert budget.held == 0


async def test_a_request_without_a_body_is_never_refused() -> None:
    async def app(_scope, receive, _send) -> None:
        await receive()

    limit = LimitMemory(app, MemoryBudget(0))
    await limit(scope(), receiving(0), send)
    with pytest.raises(BodyTooLargeError):
        await limit(scope(), receiving(1), send)


# Slow bodies.


def body_of(parts: Parts, *, whole: bool = False) -> TimedBody:
    """A body of parts (seconds to wait, bytes); after them it stalls, or ends if it is `whole`."""
    delayed = list(parts)
    inbox = asyncio.Queue[dict[str, Any]]()

    async def arrive() -> None:
        for number, (seconds, size) in enumerate(delayed):
            await asyncio.sleep(seconds)
            more = not whole or number + 1 < len(delayed)
            inbox.put_nowait({"type": "http.request", "body": b"x" * size, "more_body": more})

    inbox.arriving = asyncio.create_task(arrive())  # type: ignore[attr-defined]
    return TimedBody(inbox.get, WINDOW)


@pytest.mark.parametrize(
    ("parts", "seconds"),
    [
        pytest.param([], WINDOW, id="nothing"),
        pytest.param([(1, ENOUGH - 1)], WINDOW, id="a byte too few"),
        # The first message after the end of a window still counts for that window.
        pytest.param([(0.5, ENOUGH // 20)] * 60, 40, id="enough for three windows"),
        pytest.param([(1.0, ENOUGH // 20)] * 60, WINDOW, id="half of what is enough"),
        # Surplus bytes of one window do not count for the next.
        pytest.param([(9.9, 5 * ENOUGH), (0.2, 1)], 20.2, id="all at the end of a window"),
    ],
)
@in_skipped_time
async def test_a_slow_body_is_408_at_the_end_of_a_window(parts, seconds) -> None:
    began, body = now(), body_of(parts)

    async def read() -> None:
        while True:
            await body.receive()

    with pytest.raises(BodyStalledError, match="10 s, send the rest of it or at least 1024 bytes"):
        await read()
    assert now() - began == pytest.approx(seconds, abs=1)


@in_skipped_time
async def test_a_small_rest_of_a_body_is_enough_and_later_messages_have_no_time_limit() -> None:
    body = body_of([(9.9, 1), (0.2, 1)], whole=True)
    for _ in range(2):
        assert (await body.receive())["body"] == b"x"
    next_message = asyncio.create_task(body.receive())
    await asyncio.sleep(1000)
    assert not next_message.done()
    next_message.cancel()


@in_skipped_time
async def test_a_body_that_arrived_while_the_process_was_stopped_is_read() -> None:
    body = body_of([(WINDOW + 0.2, ENOUGH)])
    assert len((await body.receive())["body"]) == ENOUGH
    body = body_of([(WINDOW + 0.3, ENOUGH)])
    with pytest.raises(BodyStalledError):
        await body.receive()


# Large bodies.


@pytest.mark.parametrize(
    ("parts", "announced", "outcome"),
    [
        pytest.param([b"a"], b"100", 200, id="announced"),
        pytest.param([b"a"], b"x", 200, id="no number announced"),
        pytest.param([b"a"], b"101", 413, id="announced too large"),
        pytest.param([b"a" * 60, b"a" * 40], None, 200, id="sent"),
        pytest.param([b"a" * 60, b"a" * 41, b"no"], None, None, id="sent too large"),
    ],
)
async def test_a_body_that_is_too_large_is_413_before_it_is_read_or_at_the_first_byte_too_many(
    parts, announced, outcome
) -> None:
    inner = Inner()
    headers = [] if announced is None else [(b"content-length", announced)]
    request = exchange(LimitBody(inner, 100), *parts, headers=headers)
    if outcome is None:
        with pytest.raises(BodyTooLargeError):
            await request
        return
    _, sent = await request
    assert sent[0]["status"] == outcome
    assert inner.body == (b"".join(parts) if outcome == 200 else None)
    if outcome == 413:
        assert b"larger than 100 bytes (MAX_BODY_BYTES)" in sent[1]["body"]
