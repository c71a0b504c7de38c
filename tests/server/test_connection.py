"""The limits of one connection: how long, how much, and in which order; on a transport in hand."""

import asyncio
import errno
import itertools
import os
import socket
from typing import Any

import pytest
from structlog.testing import capture_logs

from smart_embedder.server import connection as module
from smart_embedder.server.connection import (
    HEADERS_TIMEOUT,
    LINGER_TIMEOUT,
    MAX_HEADER_BYTES,
    MAX_PATH_BYTES,
    MAX_PIPELINED_REQUESTS,
    ConnectionTurns,
)
from tests.server.wire import RESPONSE_TIMEOUT, Client, pair
from tests.support.skipped_time import in_skipped_time, now, turns

GET = b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n"
CHUNKED = b"POST /%d HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"


def post(length: int, *, path: str = "/", headers: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\n{headers}Content-Length: {length}\r\n\r\n"
    return head.encode()


# Time.


@in_skipped_time
async def test_a_client_that_sends_nothing_is_disconnected_after_the_time_for_headers() -> None:
    how, seconds = await Client().ended()
    assert how == "closed"
    assert seconds == pytest.approx(HEADERS_TIMEOUT + 0.1, abs=0.05)


@in_skipped_time
async def test_headers_that_come_byte_by_byte_have_no_more_time() -> None:
    client = Client()
    for byte in GET % 1:
        if client.wire.ended is None:
            await client.send(bytes([byte]))
            await asyncio.sleep(0.5)
    how, seconds = await client.ended()
    assert (how, client.app.paths) == ("closed", [])
    assert seconds == pytest.approx(HEADERS_TIMEOUT + 0.1, abs=0.6)


@in_skipped_time
async def test_headers_that_are_complete_in_time_are_answered_however_long_that_takes() -> None:
    client = Client()
    client.app.go.clear()
    await client.send(GET % 1)
    await asyncio.sleep(1000)
    assert client.wire.ended is None
    client.app.go.set()
    await turns()
    assert client.statuses == [200]


@in_skipped_time
async def test_a_connection_that_was_stopped_reads_what_arrived_before_it_is_found_overdue() -> (
    None
):
    """As a process that was stopped: timers are due before the bytes that came meanwhile."""
    client = Client()
    await asyncio.sleep(HEADERS_TIMEOUT + 0.05)
    await client.send(GET % 1)
    await asyncio.sleep(1)
    assert (client.wire.ended, client.statuses) == (None, [200])


@in_skipped_time
async def test_a_kept_connection_has_its_idle_time_and_then_the_time_for_headers() -> None:
    client = Client()
    await client.send(GET % 1)
    await client.wire.is_ending.wait()
    assert now() - client.began == pytest.approx(75.1, abs=0.05)
    client = Client()
    await client.send(GET % 1)
    await asyncio.sleep(60)
    await client.send(b"G")
    _, seconds = await client.ended()
    assert seconds == pytest.approx(60 + HEADERS_TIMEOUT + 0.1, abs=0.05)


@in_skipped_time
async def test_headers_of_a_next_request_wait_for_the_one_in_work() -> None:
    client = Client()
    client.app.go.clear()
    await client.send(GET % 1 + b"GET /2")
    await asyncio.sleep(5 * HEADERS_TIMEOUT)
    assert client.wire.ended is None
    client.app.go.set()
    await turns()
    how, seconds = await client.ended()
    assert (how, client.statuses) == ("closed", [200])
    assert seconds <= 6 * HEADERS_TIMEOUT + 1


@pytest.mark.parametrize("in_the_middle", [False, True])
def test_a_client_that_does_not_read_its_answer_is_cut_off(in_the_middle: bool) -> None:
    @in_skipped_time
    async def stop_to_read() -> None:
        client = Client()
        client.wire.unread = 1
        if in_the_middle:
            client.app.go.clear()
        with capture_logs() as log:
            await client.send(GET % 1)
            if in_the_middle:
                client.protocol.pause_writing()
                client.app.go.set()
            how, seconds = await client.ended()
        assert how == "aborted"
        assert seconds == pytest.approx(RESPONSE_TIMEOUT, abs=0.05)
        (warning,) = log
        assert (warning["event"], warning["seconds"]) == ("answer_not_taken", RESPONSE_TIMEOUT)

    stop_to_read()


@in_skipped_time
async def test_a_client_that_has_read_its_answer_is_not_cut_off() -> None:
    client = Client()
    client.wire.unread = 1
    await client.send(GET % 1)
    client.wire.unread = 0
    how, seconds = await client.ended()
    assert how == "closed"
    assert seconds > RESPONSE_TIMEOUT


@in_skipped_time
async def test_a_next_request_tells_that_the_answer_before_was_read() -> None:
    client = Client()
    client.wire.unread = 1
    await client.send(GET % 1)
    await asyncio.sleep(RESPONSE_TIMEOUT - 1)
    await client.send(GET % 2)
    await asyncio.sleep(RESPONSE_TIMEOUT - 1)
    assert client.wire.ended is None


@in_skipped_time
async def test_a_client_whose_buffer_is_full_has_read_nothing_whatever_it_sends() -> None:
    client = Client()
    client.wire.unread = 1
    client.protocol.pause_writing()
    await client.send(GET % 1)
    await asyncio.sleep(RESPONSE_TIMEOUT - 1)
    await client.send(GET % 2)
    how, seconds = await client.ended()
    assert how == "aborted"
    assert seconds == pytest.approx(RESPONSE_TIMEOUT, abs=0.05)


@in_skipped_time
async def test_a_stream_has_twice_the_time_and_it_begins_anew_whenever_its_client_reads() -> None:
    client = Client()
    client.app.streams = True
    await client.send(GET % 1)
    client.wire.unread = 1
    for _ in range(5):
        client.protocol.pause_writing()
        await asyncio.sleep(1.9 * RESPONSE_TIMEOUT)
        client.protocol.resume_writing()
    assert client.wire.ended is None
    client.began = now()
    client.protocol.pause_writing()
    how, seconds = await client.ended()
    assert how == "aborted"
    assert seconds == pytest.approx(2 * RESPONSE_TIMEOUT, abs=0.05)


@in_skipped_time
async def test_an_answer_of_known_length_has_one_time_for_the_whole() -> None:
    client = Client()
    client.app.go.clear()
    await client.send(GET % 1)
    client.wire.unread = 1
    for _ in range(2):
        client.protocol.pause_writing()
        await asyncio.sleep(0.6 * RESPONSE_TIMEOUT)
        client.protocol.resume_writing()
    how, seconds = await client.ended()
    assert how == "aborted"
    assert seconds == pytest.approx(RESPONSE_TIMEOUT, abs=0.3 * RESPONSE_TIMEOUT)


@in_skipped_time
async def test_a_client_that_sends_on_after_its_answer_has_a_moment_to_end_its_body() -> None:
    client = Client()
    client.app.reads = False
    await client.send(post(100) + b"a")
    assert client.statuses == [200]
    how, seconds = await client.ended()
    assert how == "closed"
    assert seconds == pytest.approx(LINGER_TIMEOUT, abs=0.05)
    client = Client()
    client.app.reads = False
    await client.send(post(100) + b"a")
    await client.send(b"b" * 99)
    await asyncio.sleep(LINGER_TIMEOUT + 1)
    assert client.wire.ended is None
    await client.send(GET % 2)
    assert client.app.paths == ["/", "/2"]


@in_skipped_time
async def test_a_request_whose_headers_came_with_the_answer_before_has_time_for_its_body() -> None:
    client = Client()
    client.app.go.clear()
    head = post(2, path="/2")
    await client.send(GET % 1 + head[:20])
    client.app.go.set()
    await turns()
    assert client.statuses == [200]
    await client.send(head[20:] + b"a")
    await asyncio.sleep(10 * LINGER_TIMEOUT)
    await client.send(b"b")
    assert (client.wire.ended, client.statuses) == (None, [200, 200])


# Sizes and order.


@in_skipped_time
async def test_requests_are_answered_in_their_order_one_at_a_time() -> None:
    client = Client()
    client.app.go.clear()
    await client.send(b"".join(GET % number for number in range(5)))
    assert client.app.paths == ["/0"]
    client.app.go.set()
    await turns(100)
    assert client.app.paths == [f"/{number}" for number in range(5)]
    assert client.statuses == [200] * 5


@in_skipped_time
async def test_only_so_many_requests_are_parsed_ahead_and_the_rest_is_left_to_the_client() -> None:
    client = Client()
    client.app.go.clear()
    await client.send(b"".join(GET % number for number in range(100)))
    # A small piece more than fills it may be parsed at once.
    assert MAX_PIPELINED_REQUESTS <= len(client.protocol.pipeline) <= MAX_PIPELINED_REQUESTS + 16
    assert not client.wire.reading
    client.app.go.set()
    await turns(2000)
    assert client.statuses == [200] * 100
    assert client.wire.reading


@in_skipped_time
async def test_a_large_body_is_read_as_fast_as_the_app_takes_it() -> None:
    client = Client()
    client.app.reads = False
    client.app.go.clear()
    await client.send(post(1_000_000))
    await client.send(b"a" * 65_536)
    assert client.wire.reading
    await client.send(b"a")
    assert not client.wire.reading
    client = Client()
    await client.send(post(1_000_000))
    for _ in range(10):
        await client.send(b"a" * 100_000)
        assert client.wire.reading
    assert [len(body) for body in client.app.bodies] == [1_000_000]


@in_skipped_time
async def test_a_body_is_parsed_in_few_parts_and_heads_in_small_ones(monkeypatch) -> None:
    """So that few requests complete within one of them, and a body costs one copy."""
    client, sizes = Client(), list[int]()
    parse = client.protocol._parse
    monkeypatch.setattr(
        client.protocol, "_parse", lambda chunk: (sizes.append(len(chunk)), parse(chunk))
    )
    await client.send(post(900_000) + b"a" * 450_000)
    await client.send(b"a" * 450_000 + (GET % 1) * 100)
    assert [len(body) for body in client.app.bodies][:1] == [900_000]
    assert len(sizes) < 20
    assert all(size <= 512 or 449_000 < size <= 450_000 for size in sizes)


@pytest.mark.parametrize("size", [1, 700, 65_000])
def test_headers_are_limited_however_they_are_cut(size: int) -> None:
    @in_skipped_time
    async def send(limit: int) -> None:
        client = Client()
        line = b"X-A: " + b"a" * (limit - 40) + b"\r\n"
        sent = b"GET / HTTP/1.1\r\nHost: a\r\n" + line + b"\r\n"
        for start in range(0, len(sent), size):
            if client.wire.ended is None and not client.wire.sent_eof:
                client.protocol.data_received(sent[start : start + size])
        await turns()
        expected = 200 if limit <= MAX_HEADER_BYTES else 431
        assert client.statuses == [expected]
        if expected != 200:
            assert client.error["code"] == "headers_too_large"
            assert client.wire.sent_eof
            assert client.app.paths == []

    send(MAX_HEADER_BYTES - 1000)
    send(MAX_HEADER_BYTES + 2000)


@pytest.mark.parametrize("size", [1, 7, 100_000])
@pytest.mark.parametrize("length", [MAX_PATH_BYTES, MAX_PATH_BYTES + 1, 60_000])
def test_a_path_is_limited_however_it_is_cut(size, length, monkeypatch) -> None:
    """Nor is decoded what is too long: 64 KiB of percent signs would take 20 ms."""
    decoded = []
    monkeypatch.setattr("urllib.parse.unquote", lambda path: decoded.append(path) or path)

    @in_skipped_time
    async def send() -> None:
        client = Client()
        head = b"GET /%b HTTP/1.1\r\nHost: a\r\n\r\n" % (b"%" * (length - 1))
        for start in range(0, len(head), size):
            if client.wire.ended is None and not client.wire.sent_eof:
                client.protocol.data_received(head[start : start + size])
        await turns()
        if length <= MAX_PATH_BYTES:
            assert (client.statuses, [*map(len, decoded)]) == ([200], [length])
        else:
            assert (client.statuses, client.error["code"]) == ([414], "uri_too_long")
            assert decoded == []

    send()


@in_skipped_time
async def test_a_query_is_as_long_as_headers_may_be() -> None:
    """A prompt of a stream, which stands there, may take 36 KiB."""
    client = Client()
    await client.send(b"POST /embeddings/stream?prompt=%b HTTP/1.1\r\n\r\n" % (b"%E4" * 12_288))
    assert client.statuses == [200]


@in_skipped_time
async def test_the_headers_of_each_request_are_limited_and_not_those_of_all_together() -> None:
    client = Client()
    large = b"GET / HTTP/1.1\r\nX-A: " + b"a" * 40_000 + b"\r\n\r\n"
    for _ in range(3):
        await client.send(large)
        await client.send(post(50_000) + b"b" * 50_000)
    assert client.statuses == [200] * 6


@in_skipped_time
async def test_what_is_no_http_is_told_after_the_answers_before_it() -> None:
    client = Client()
    client.app.go.clear()
    await client.send(GET % 1 + GET % 2 + b"what?\r\n\r\n" + GET % 3)
    assert client.statuses == []
    client.app.go.set()
    await turns(50)
    assert client.statuses == [200, 200, 400]
    assert client.error["code"] == "malformed_request"
    assert client.app.paths == ["/1", "/2"]
    assert client.wire.sent_eof
    await client.send(GET % 4)
    assert client.app.paths == ["/1", "/2"]


@in_skipped_time
async def test_what_follows_refused_headers_is_dropped_while_answers_are_awaited() -> None:
    client = Client()
    client.app.go.clear()
    await client.send(GET % 1 + b"GET /2 HTTP/1.1\r\nHost: a\r\nX-A: " + b"a" * 70_000)
    await client.send(b"a\r\n\r\n" + GET % 3)
    client.app.go.set()
    await turns(50)
    assert (client.app.paths, client.statuses) == (["/1"], [200, 431])


@in_skipped_time
async def test_a_body_that_cannot_be_parsed_ends_its_own_request() -> None:
    client = Client()
    for part in (CHUNKED % 1, b"5\r\nabcde\r\n", b"zz\r\n"):
        await client.send(part)
    assert (client.app.left, client.statuses) == (["/1"], [400])
    client = Client()
    client.app.go.clear()
    await client.send(GET % 1 + CHUNKED % 2 + b"zz\r\n")
    client.app.go.set()
    await turns(50)
    assert (client.app.paths, client.statuses) == (["/1"], [200, 400]), "it never began"
    client = Client()
    client.app.reads, client.app.streams = False, True
    for part in (CHUNKED % 1, b"5\r\nabcde\r\n", b"zz\r\n"):
        await client.send(part)
    assert client.statuses == [200], "no error is written into an answer"
    assert client.wire.sent_eof


UPGRADE = (
    b"Connection: Upgrade, HTTP2-Settings, keep-alive\r\nUpgrade: h2c\r\nHTTP2-Settings: a\r\n"
)


@in_skipped_time
async def test_an_offer_to_upgrade_is_passed_over_and_the_request_is_answered() -> None:
    client = Client()
    with_body = b"POST /1 HTTP/1.1\r\nHost: a\r\n" + UPGRADE + b"Content-Length: 3\r\n\r\nabc"
    await client.send(with_body + GET % 2)
    assert client.statuses == [200, 200]
    assert client.app.bodies == [b"abc", b""]
    assert client.app.paths == ["/1", "/2"]


@in_skipped_time
async def test_it_is_no_proxy() -> None:
    client = Client()
    with capture_logs() as log:
        await client.send(b"CONNECT example.org:443 HTTP/1.1\r\nHost: a\r\n\r\n")
    assert [(each["event"], each["client"]) for each in log] == [("malformed_request", "192.0.2.1")]
    assert (client.statuses, client.app.paths) == ([400], [])
    assert client.error["detail"] == "This is no proxy."


# The end.


@in_skipped_time
async def test_the_app_can_cut_its_client_off_and_see_that_it_is_going() -> None:
    client = Client()
    client.app.go.clear()
    await client.send(GET % 1)
    (state,) = client.app.states
    assert not state["is_closing"]()
    state["abort_connection"]()
    assert client.wire.ended == "aborted"
    assert state["is_closing"]()


@in_skipped_time
async def test_a_request_whose_client_has_gone_is_told_so() -> None:
    client = Client()
    await client.send(post(10) + b"abc")
    client.protocol.connection_lost(None)
    await turns()
    assert client.app.left == ["/"]
    assert not client.state.connections
    client = Client()
    client.app.watches = True
    await client.send(GET % 1 + GET % 2)
    client.protocol.connection_lost(None)
    await turns()
    assert (client.app.paths, client.app.left) == (["/1"], ["/1"]), "the other never began"


@in_skipped_time
async def test_nothing_of_a_connection_happens_after_its_end() -> None:
    client = Client()
    client.app.go.clear()
    await client.send(b"".join(GET % number for number in range(100)))
    client.wire.unread = 1
    client.protocol.pause_writing()
    client.protocol.connection_lost(ConnectionResetError())
    client.app.go.set()
    with capture_logs() as log:
        await asyncio.sleep(1000)
    assert client.app.paths == ["/0"]
    assert log == []


@in_skipped_time
async def test_a_stream_whose_client_has_left_ends_though_nothing_is_read() -> None:
    near, far = pair()
    with near, far:
        client = Client(connection=near)
        client.app.streams, client.app.reads = True, False
        await client.send(post(1_000_000) + b"a" * 70_000)
        assert not client.wire.reading
        await asyncio.sleep(100)
        assert client.wire.ended is None
        client.began = now()
        far.close()
        how, seconds = await client.ended()
    assert how == "aborted"
    assert seconds <= 0.6


@in_skipped_time
async def test_a_request_of_known_length_is_computed_on_though_its_client_has_left() -> None:
    """It shows when the answer is written."""
    near, far = pair()
    with near, far:
        client = Client(connection=near)
        client.app.reads = False
        client.app.go.clear()
        await client.send(post(1_000_000) + b"a" * 70_000)
        far.close()
        await asyncio.sleep(10)
        assert client.wire.ended is None


@in_skipped_time
async def test_while_it_drains_the_last_answer_of_a_connection_closes_it() -> None:
    waiting, arriving = Client(), Client()
    waiting.app.go.clear()
    await waiting.send(GET % 1 + GET % 2)
    await arriving.send(GET % 1)
    for client in (waiting, arriving):
        client.drain.begin()
    waiting.protocol.close_after_response()
    waiting.app.go.set()
    await arriving.send(GET % 2)
    await turns(50)
    for client in (waiting, arriving):
        heads = client.wire.written.split(b"HTTP/1.1 ")[1:]
        assert [b"connection: close" in head for head in heads] == [False, True]
        assert client.wire.sent_eof


@in_skipped_time
async def test_at_the_end_idle_connections_close_at_once_and_others_after_their_answer() -> None:
    idle, busy = Client(), Client()
    busy.app.go.clear()
    await busy.send(GET % 1)
    for client in (idle, busy):
        client.protocol.shutdown()
    assert (idle.wire.ended, busy.wire.ended) == ("closed", None)
    busy.app.go.set()
    await turns()
    assert busy.statuses == [200]
    assert busy.wire.sent_eof


@in_skipped_time
async def test_the_last_descriptor_is_told_of_and_no_other_failure(monkeypatch) -> None:
    events = []
    for number in (errno.EMFILE, errno.EBADF, None):

        def dup(descriptor: int, number: int | None = number) -> int:
            if number is not None:
                raise OSError(number, os.strerror(number))
            return os.open(os.devnull, os.O_RDONLY)

        with monkeypatch.context() as patch, socket.socket() as own, capture_logs() as log:
            patch.setattr(module.os, "dup", dup)
            Client(connection=own)
            events.append([each["event"] for each in log])
    assert events == [["descriptor_limit_reached"], [], []]


# Turns.

# A call of the parser has 512 bytes at most, of which a chunk of one byte needs six.
MOST_OF_A_TURN = 1000 + 512 // 6


def held(*clients: Client) -> int:
    """Bytes of bodies that were parsed, of apps that do not take them."""
    return sum(len(client.protocol.cycle.body) for client in clients)


async def begun() -> Client:
    client = Client()
    client.app.reads = False
    client.app.go.clear()
    await client.send(CHUNKED % 1)
    return client


async def test_chunks_of_one_byte_are_parsed_in_turns_of_a_thousand() -> None:
    client = await begun()
    client.protocol.data_received(b"1\r\na\r\n" * 20_000)
    counts = [held(client)]
    while counts[-1] < 20_000:
        await turns(1)
        counts.append(held(client))
    steps = [after - before for before, after in itertools.pairwise([0, *counts])]
    assert max(steps) <= MOST_OF_A_TURN
    client.protocol.data_received(b"0\r\n\r\n")
    client.app.go.set()
    await turns()
    assert client.statuses == [200]


async def test_connections_with_much_to_parse_have_one_turn_at_a_time() -> None:
    clients, shared = [await begun() for _ in range(4)], ConnectionTurns()
    for client in clients:  # As those of one server do, whose protocol is one class.
        client.protocol.turns = shared
        client.protocol.data_received(b"1\r\na\r\n" * 5000)
    before, most = held(*clients), 0
    assert before <= len(clients) * MOST_OF_A_TURN
    while before < 20_000:
        await turns(1)
        after = held(*clients)
        most, before = max(most, after - before), after
    assert most <= MOST_OF_A_TURN
    assert {held(client) for client in clients} == {5000}


async def test_requests_begin_one_at_a_time_and_in_turns_of_addresses() -> None:
    shared, clients = ConnectionTurns(), [Client() for _ in range(9)]
    for client in clients:
        client.protocol.turns = shared
        client.protocol.client = ("192.0.2.1", 7)
    other = clients[-1]
    other.protocol.client = ("192.0.2.2", 7)
    for client in clients:
        client.protocol.data_received(GET % 1)
    seen, counts = 0, [0]
    while counts[-1] < len(clients):
        await turns(1)
        counts.append(sum(len(client.app.paths) for client in clients))
        if other.app.paths and not seen:
            seen = counts[-1]
    assert max(after - before for before, after in itertools.pairwise(counts)) == 1
    assert seen <= 3
    assert all(client.statuses == [200] for client in clients)


async def test_a_connection_that_is_lost_has_no_further_turn() -> None:
    client = await begun()
    client.protocol.data_received(b"1\r\na\r\n" * 20_000)
    parsed = held(client)
    assert parsed <= MOST_OF_A_TURN
    failures = list[Any]()
    asyncio.get_running_loop().set_exception_handler(lambda _, what: failures.append(what))
    client.protocol.connection_lost(None)
    await turns()
    assert (held(client), failures) == (parsed, [])


async def test_headers_are_parsed_in_turns_and_the_request_is_answered() -> None:
    client = Client()
    client.protocol.data_received(b"GET /1 HTTP/1.1\r\nHost: a\r\n" + b"a:\r\n" * 10_000)
    parsed = len(client.protocol.headers)
    await turns(1)
    assert parsed <= 1000 + 512 // 4
    assert len(client.protocol.headers) <= 2 * (1000 + 512 // 4)
    await turns(20)
    await client.send(b"\r\n")
    assert client.statuses == [200]


async def test_trailers_never_become_headers() -> None:
    client = Client()
    await client.send(CHUNKED % 1 + b"1\r\nx\r\n0\r\nX-Request-ID: trailer\r\n\r\n" + GET % 2)
    await turns()
    first, second = client.app.headers
    assert [name for name, _ in first] == [b"host", b"transfer-encoding"]
    assert second == [(b"host", b"a")]
