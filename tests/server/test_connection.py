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
POST = b"POST /%d HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"
AFTER_ALL_HEADERS = pytest.approx(HEADERS_TIMEOUT + 0.1, abs=0.05)
HUNDRED = b"".join(GET % number for number in range(100))


async def test_an_answer_of_one_part_is_written_at_once_and_a_head_waits_for_no_later_part() -> (
    None
):
    client = Client()
    await client.send(GET % 1)
    assert (client.statuses, client.wire.writes) == ([200], 1)
    lingering = client.protocol._lingering
    lingering.write(b"HTTP/1.1 200 OK\r\n\r\n")
    assert client.wire.writes == 1
    await turns()
    assert (client.statuses, client.wire.writes) == ([200, 200], 2)
    lingering.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    lingering.close()
    assert (client.statuses, client.wire.writes) == ([200, 200, 400], 3)


# Time.


@in_skipped_time
async def test_headers_have_their_time_however_slowly_they_come() -> None:
    silent = Client()
    assert await silent.ended() == ("closed", AFTER_ALL_HEADERS)
    client = Client()
    for byte in GET % 1:
        await client.send_in_pieces(bytes([byte]), 1)
        await asyncio.sleep(0.5 if client.wire.ended is None else 0)
    assert await client.ended() == ("closed", pytest.approx(HEADERS_TIMEOUT + 0.1, abs=0.6))
    assert client.app.paths == []


@in_skipped_time
async def test_a_connection_that_was_stopped_reads_what_arrived_before_it_is_found_overdue() -> (
    None
):
    """As a process that was stopped: timers are due before the bytes that came meanwhile."""
    client = Client()
    await asyncio.sleep(HEADERS_TIMEOUT + 0.05)
    await client.send(GET % 1)
    await asyncio.sleep(75.05)
    await client.send(GET % 2)
    await asyncio.sleep(1)
    assert (client.wire.ended, client.statuses) == (None, [200, 200])


@in_skipped_time
async def test_a_kept_connection_has_its_idle_time_and_then_the_time_for_headers() -> None:
    client = Client()
    await client.send(GET % 1)
    await client.wire.is_ending.wait()
    assert now() - client.began == pytest.approx(75.1, abs=0.05)
    client = Client()
    await client.send(GET % 1)
    await asyncio.sleep(60)
    client.began = now()
    await client.send(b"G")
    assert await client.ended() == ("closed", AFTER_ALL_HEADERS)


@in_skipped_time
async def test_an_answer_may_take_long_and_headers_of_the_next_request_wait_for_it() -> None:
    client = Client(held=True)
    await client.send(GET % 1 + b"GET /2")
    await asyncio.sleep(5 * HEADERS_TIMEOUT)
    assert client.wire.ended is None
    await client.go()
    how, seconds = await client.ended()
    assert (how, client.statuses) == ("closed", [200])
    assert seconds <= 6 * HEADERS_TIMEOUT + 1


@pytest.mark.parametrize("in_the_middle", [False, True])
@in_skipped_time
async def test_a_client_that_does_not_read_its_answer_is_cut_off(in_the_middle: bool) -> None:
    client = Client(held=in_the_middle)
    client.wire.unread = 1
    with capture_logs() as log:
        await client.send(GET % 1)
        if in_the_middle:
            client.protocol.pause_writing()
            client.app.go.set()
        assert await client.ended() == ("aborted", pytest.approx(RESPONSE_TIMEOUT, abs=0.05))
    (warning,) = log
    assert (warning["event"], warning["seconds"]) == ("answer_not_taken", RESPONSE_TIMEOUT)


@in_skipped_time
async def test_what_is_read_or_asked_next_tells_that_an_answer_was_taken() -> None:
    read, asking, full = Client(), Client(), Client()
    for client in (read, asking, full):
        client.wire.unread = 1
    full.protocol.pause_writing()
    for client in (read, asking, full):
        await client.send(GET % 1)
    read.wire.unread = 0
    await asyncio.sleep(RESPONSE_TIMEOUT - 1)
    for client in (asking, full):
        await client.send(GET % 2)
    await asyncio.sleep(RESPONSE_TIMEOUT - 1)
    assert (read.wire.ended, asking.wire.ended) == (None, None)
    assert full.wire.ended == "aborted", "it sends whatever its buffer holds"


@in_skipped_time
async def test_a_stream_has_twice_the_time_and_it_begins_anew_whenever_its_client_reads() -> None:
    client = Client(streams=True)
    await client.send(GET % 1)
    client.wire.unread = 1
    for _ in range(5):
        client.protocol.pause_writing()
        await asyncio.sleep(1.9 * RESPONSE_TIMEOUT)
        client.protocol.resume_writing()
    assert client.wire.ended is None
    client.began = now()
    client.protocol.pause_writing()
    assert await client.ended() == ("aborted", pytest.approx(2 * RESPONSE_TIMEOUT, abs=0.05))


@in_skipped_time
async def test_an_answer_of_known_length_has_one_time_for_the_whole() -> None:
    client = Client(held=True)
    await client.send(GET % 1)
    client.wire.unread = 1
    for _ in range(2):
        client.protocol.pause_writing()
        await asyncio.sleep(0.6 * RESPONSE_TIMEOUT)
        client.protocol.resume_writing()
    about = pytest.approx(RESPONSE_TIMEOUT, abs=0.3 * RESPONSE_TIMEOUT)
    assert await client.ended() == ("aborted", about)


@in_skipped_time
async def test_a_client_that_sends_on_after_its_answer_has_a_moment_to_end_its_body() -> None:
    stalls, ends = Client(reads=False), Client(reads=False)
    for client in (stalls, ends):
        await client.send(POST % (1, 100) + b"a")
    await ends.send(b"b" * 99)
    assert stalls.statuses == [200]
    assert await stalls.ended() == ("closed", pytest.approx(LINGER_TIMEOUT, abs=0.05))
    await asyncio.sleep(1)
    assert ends.wire.ended is None
    await ends.send(GET % 2)
    assert ends.app.paths == ["/1", "/2"]


@in_skipped_time
async def test_a_request_whose_headers_came_with_the_answer_before_has_time_for_its_body() -> None:
    client, head = Client(held=True), POST % (2, 2)
    await client.send(GET % 1 + head[:20])
    await client.go()
    assert client.statuses == [200]
    await client.send(head[20:] + b"a")
    await asyncio.sleep(10 * LINGER_TIMEOUT)
    await client.send(b"b")
    assert (client.wire.ended, client.statuses) == (None, [200, 200])


# Sizes and order.


@in_skipped_time
async def test_requests_are_answered_in_order_and_only_so_many_are_parsed_ahead() -> None:
    client = Client(held=True)
    await client.send(HUNDRED)
    assert client.app.paths == ["/0"]
    # A small piece more than fills it may be parsed at once.
    assert MAX_PIPELINED_REQUESTS <= len(client.protocol.pipeline) <= MAX_PIPELINED_REQUESTS + 16
    assert not client.wire.reading
    await client.go()
    await turns(2000)
    assert client.app.paths == [f"/{number}" for number in range(100)]
    assert client.statuses == [200] * 100
    assert client.wire.reading
    client, sizes = Client(), [0, 200_000, 3, 70_000, 0, 0, 65_536, 1]
    await client.send(b"".join(POST % (1, size) + b"a" * size for size in sizes))
    await turns(100)
    assert [len(body) for body in client.app.bodies] == sizes


@in_skipped_time
async def test_a_large_body_is_read_as_fast_as_the_app_takes_it() -> None:
    client = Client(held=True, reads=False)
    await client.send(POST % (1, 1_000_000))
    await client.send(b"a" * 65_536)
    assert client.wire.reading
    await client.send(b"a")
    assert not client.wire.reading
    client = Client()
    await client.send(POST % (1, 1_000_000))
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
    await client.send(POST % (1, 900_000) + b"a" * 450_000)
    await client.send(b"a" * 450_000 + HUNDRED)
    assert [len(body) for body in client.app.bodies][:1] == [900_000]
    assert len(sizes) < 20
    assert all(size <= 512 or 449_000 < size <= 450_000 for size in sizes)


@pytest.mark.parametrize("size", [1, 700, 65_000])
@pytest.mark.parametrize("length", [MAX_HEADER_BYTES - 1000, MAX_HEADER_BYTES + 2000])
@in_skipped_time
async def test_headers_are_limited_however_they_are_cut(size: int, length: int) -> None:
    client = Client()
    line = b"X-A: " + b"a" * (length - 40) + b"\r\n"
    await client.send_in_pieces(b"GET / HTTP/1.1\r\nHost: a\r\n" + line + b"\r\n", size)
    if length <= MAX_HEADER_BYTES:
        assert client.statuses == [200]
    else:
        assert (client.statuses, client.error["code"]) == ([431], "headers_too_large")
        assert client.wire.sent_eof
        assert client.app.paths == []


@pytest.mark.parametrize("size", [1, 7, 100_000])
@pytest.mark.parametrize("length", [MAX_PATH_BYTES, MAX_PATH_BYTES + 1, 60_000])
@in_skipped_time
async def test_a_path_is_limited_however_it_is_cut(size, length, monkeypatch) -> None:
    """Nor is decoded what is too long: 64 KiB of percent signs would take 20 ms."""
    decoded = []
    monkeypatch.setattr("urllib.parse.unquote", lambda path: decoded.append(len(path)) or path)
    client = Client()
    head = b"GET /%b HTTP/1.1\r\nHost: a\r\n\r\n" % (b"%" * (length - 1))
    await client.send_in_pieces(head, size)
    if length <= MAX_PATH_BYTES:
        assert (client.statuses, decoded) == ([200], [length])
    else:
        assert (client.statuses, client.error["code"]) == ([414], "uri_too_long")
        assert decoded == []


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
        await client.send(POST % (1, 50_000) + b"b" * 50_000)
    assert client.statuses == [200] * 6


@pytest.mark.parametrize(
    ("parts", "paths", "statuses", "code"),
    [
        pytest.param(
            [GET % 1 + GET % 2 + b"what?\r\n\r\n" + GET % 3, GET % 4],
            ["/1", "/2"], [200, 200, 400], "malformed_request", id="no HTTP",
        ),
        pytest.param(
            [GET % 1 + b"GET /2 HTTP/1.1\r\nX-A: " + b"a" * 70_000, b"a\r\n\r\n" + GET % 3],
            ["/1"], [200, 431], "headers_too_large", id="too large headers",
        ),
        pytest.param(
            [GET % 1 + CHUNKED % 2 + b"zz\r\n"],
            ["/1"], [200, 400], "malformed_request", id="a body of a request that never began",
        ),
    ],
)  # fmt: skip
@in_skipped_time
async def test_what_is_refused_is_told_after_the_answers_before_it_and_the_rest_is_dropped(
    parts, paths, statuses, code
) -> None:
    client = Client(held=True)
    for part in parts:
        await client.send(part)
    assert client.statuses == []
    await client.go()
    assert (client.app.paths, client.statuses) == (paths, statuses)
    assert client.error["code"] == code
    assert client.wire.sent_eof
    await client.send(GET % 5)
    assert client.app.paths == paths


@in_skipped_time
async def test_a_body_that_cannot_be_parsed_ends_its_own_request() -> None:
    waiting, answering = Client(), Client(reads=False, streams=True)
    for client in (waiting, answering):
        for part in (CHUNKED % 1, b"5\r\nabcde\r\n", b"zz\r\n"):
            await client.send(part)
    assert (waiting.app.left, waiting.statuses) == (["/1"], [400])
    assert answering.statuses == [200], "no error is written into an answer"
    assert answering.wire.sent_eof


H2C = b"Connection: Upgrade, HTTP2-Settings, keep-alive\r\nUpgrade: h2c\r\nHTTP2-Settings: a\r\n"
WEBSOCKET = b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
LENGTH = b"Content-Length: 12\r\n\r\nhello world!"
CHUNKS = b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n7\r\n world!\r\n0\r\n\r\n"


@pytest.mark.parametrize("step", [1, 7, 100_000])
@pytest.mark.parametrize(
    ("offer", "framed"),
    [
        pytest.param(H2C, LENGTH, id="h2c"),
        pytest.param(H2C, CHUNKS, id="h2c, chunked"),
        pytest.param(H2C + b"Expect: 100-continue\r\n", LENGTH, id="h2c, expects"),
        pytest.param(b"Connection: Upgrade\r\nUpgrade: h2c, foo/2\r\n", LENGTH, id="two"),
        pytest.param(WEBSOCKET, LENGTH, id="websocket"),
    ],
)
@in_skipped_time
async def test_an_offer_to_upgrade_is_passed_over_wherever_a_request_is_cut(
    offer, framed, step
) -> None:
    client, request = Client(), b"POST /1 HTTP/1.1\r\nHost: a\r\n" + offer + framed
    sent = request + GET % 2 + request
    for start in range(0, len(sent), step):
        await client.send(sent[start : start + step])
    assert client.app.bodies == [b"hello world!", b"", b"hello world!"]
    assert client.app.paths == ["/1", "/2", "/1"]
    assert (100 in client.statuses) == (b"Expect" in offer)
    assert [status for status in client.statuses if status != 100] == [200] * 3


@in_skipped_time
async def test_an_offer_to_upgrade_changes_nothing_else() -> None:
    client, head = Client(), b"POST /1 HTTP/1.1\r\nHost: a\r\n" + H2C
    await client.send(head + b"Content-Length: 140000\r\n\r\n" + b"a" * 140_000)
    assert [len(body) for body in client.app.bodies] == [140_000]
    await client.send(head.replace(b"keep-alive", b"close") + LENGTH + GET % 3)
    assert (client.statuses, client.wire.sent_eof) == ([200, 200], True)
    client = Client()
    await client.send(head + b"Content-Length: 3\r\n" + LENGTH)
    assert (client.statuses, client.app.paths) == ([400], []), "of two lengths"


@in_skipped_time
async def test_it_is_no_proxy_and_an_error_is_a_whole_answer_that_tells_of_the_end() -> None:
    clients = Client(), Client()
    with capture_logs() as log:
        for client in clients:
            await client.send(b"CONNECT example.org:443 HTTP/1.1\r\nHost: a\r\n\r\n")
    assert {(each["event"], each["client"]) for each in log} == {("malformed_request", "192.0.2.1")}
    assert len({client.error["request_id"] for client in clients}) == 2
    head, _, body = client.wire.written.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    assert status == "HTTP/1.1 400 Bad Request"
    assert sorted(lines) == [
        "connection: close",
        f"content-length: {len(body)}",
        "content-type: application/json",
        f"x-request-id: {client.error['request_id']}",
    ]
    assert (client.error["detail"], client.app.paths) == ("This is no proxy.", [])


# The end.


@in_skipped_time
async def test_the_app_can_cut_its_client_off_and_see_that_it_is_going() -> None:
    client = Client(held=True)
    await client.send(GET % 1)
    (state,) = client.app.states
    assert not state["is_closing"]()
    state["abort_connection"]()
    assert client.wire.ended == "aborted"
    assert state["is_closing"]()


@in_skipped_time
async def test_a_request_whose_client_has_gone_is_told_so() -> None:
    sending, sent = Client(), Client()
    sent.app.watches = True
    await sending.send(POST % (1, 10) + b"abc")
    await sent.send(GET % 1 + GET % 2)
    for client in (sending, sent):
        client.protocol.connection_lost(None)
        await turns()
        assert (client.app.paths, client.app.left) == (["/1"], ["/1"]), "the other never began"
        assert not client.state.connections


@in_skipped_time
async def test_nothing_of_a_connection_happens_after_its_end() -> None:
    client = Client(held=True)
    await client.send(HUNDRED)
    client.wire.unread = 1
    client.protocol.pause_writing()
    client.protocol.connection_lost(ConnectionResetError())
    client.app.go.set()
    with capture_logs() as log:
        await asyncio.sleep(1000)
    assert client.app.paths == ["/0"]
    assert log == []


@pytest.mark.parametrize("streams", [False, True])
@in_skipped_time
async def test_a_client_that_has_left_unnoticed_ends_its_stream_and_no_other_request(
    streams: bool,
) -> None:
    """Of another request it shows when the answer is written."""
    near, far = pair()
    with near, far:
        client = Client(near, held=not streams, reads=False, streams=streams)
        await client.send(POST % (1, 1_000_000) + b"a" * 70_000)
        assert not client.wire.reading
        await asyncio.sleep(100)
        assert client.wire.ended is None
        far.close()
        await asyncio.sleep(0.6)
        assert client.wire.ended == ("aborted" if streams else None)
        await asyncio.sleep(10)
        assert client.wire.ended == ("aborted" if streams else None)


@in_skipped_time
async def test_while_it_drains_the_last_answer_of_a_connection_closes_it() -> None:
    waiting, arriving = Client(held=True), Client()
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
    idle, busy = Client(), Client(held=True)
    await busy.send(GET % 1)
    for client in (idle, busy):
        client.protocol.shutdown()
    assert (idle.wire.ended, busy.wire.ended) == ("closed", None)
    await busy.go()
    assert busy.statuses == [200]
    assert busy.wire.sent_eof


@pytest.mark.parametrize(
    ("number", "events"),
    [(errno.EMFILE, ["descriptor_limit_reached"]), (errno.EBADF, []), (None, [])],
)
@in_skipped_time
async def test_the_last_descriptor_is_told_of_and_no_other_failure(
    number, events, monkeypatch
) -> None:
    def dup(_descriptor: int) -> int:
        if number is not None:
            raise OSError(number, os.strerror(number))
        return os.open(os.devnull, os.O_RDONLY)

    monkeypatch.setattr(module.os, "dup", dup)
    with socket.socket() as own, capture_logs() as log:
        Client(own)
    assert [each["event"] for each in log] == events


# Turns.

# A call of the parser has 512 bytes at most, of which a chunk of one byte needs six.
MOST_OF_A_TURN = 1000 + 512 // 6


def held(*clients: Client) -> int:
    """Bytes of bodies that were parsed, of apps that do not take them."""
    return sum(len(client.protocol.cycle.body) for client in clients)


async def begun() -> Client:
    client = Client(held=True, reads=False)
    await client.send(CHUNKED % 1)
    return client


@pytest.mark.parametrize("count", [1, 4])
async def test_chunks_of_one_byte_are_parsed_in_turns_of_a_thousand_one_connection_at_a_time(
    count: int,
) -> None:
    clients, shared = [await begun() for _ in range(count)], ConnectionTurns()
    for client in clients:  # As those of one server do, whose protocol is one class.
        client.protocol.turns = shared
        client.protocol.data_received(b"1\r\na\r\n" * 5000)
    parsed = [held(*clients)]
    assert parsed[0] <= count * MOST_OF_A_TURN
    while parsed[-1] < count * 5000:
        await turns(1)
        parsed.append(held(*clients))
    assert max(b - a for a, b in itertools.pairwise(parsed)) <= MOST_OF_A_TURN
    assert {held(client) for client in clients} == {5000}
    for client in clients:
        client.protocol.data_received(b"0\r\n\r\n")
        await client.go()
        assert client.statuses == [200]


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
    client, most = Client(), 1000 + 512 // 4
    client.protocol.data_received(b"GET /1 HTTP/1.1\r\nHost: a\r\n" + b"a:\r\n" * 10_000)
    for turn in (1, 2):
        assert len(client.protocol.headers) <= turn * most
        await turns(1)
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
