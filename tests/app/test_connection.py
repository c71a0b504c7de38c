"""The limits of a connection: time, size and order. The transport is a fake."""

import pytest
from structlog.testing import capture_logs

from app.connection import (
    HEADERS_TIMEOUT,
    MAX_HEADER_BYTES,
    MAX_PIPELINED_REQUESTS,
)
from tests.app.wire import RESPONSE_TIMEOUT, Client
from tests.support.skipped_time import in_skipped_time, run_ready

GET = b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n"
CHUNKED = b"POST /%d HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
POST = b"POST /%d HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"


# Time.


@pytest.mark.parametrize("began", [b"", b"\r\n", b"GET /1 HT"])
@in_skipped_time
async def test_headers_must_be_complete_in_ten_seconds(began: bytes) -> None:
    client = Client()
    await client.send(began)
    await client.wait(10)
    assert client.wire.ended is None
    await client.wait(1)
    assert client.wire.ended == "closed"
    assert client.app.paths == []


@in_skipped_time
async def test_slow_headers_get_no_more_time_and_complete_ones_do() -> None:
    slow, asking = Client(), Client()
    for byte in GET % 1:
        await slow.send_in_pieces(bytes([byte]), 1)
        await slow.wait(1)
    assert (slow.wire.ended, slow.app.paths) == ("closed", [])
    request = GET % 1
    await asking.send(request[:10])
    for _ in range(3 * HEADERS_TIMEOUT):
        await asking.wait(1)
        await asking.send(request[10:] + request[:10])
    assert asking.wire.ended is None


@in_skipped_time
async def test_an_idle_connection_is_kept_and_its_next_headers_are_limited() -> None:
    client = Client()
    await client.send(GET % 1)
    await client.wait(60)
    await client.send(b"G")
    await client.wait(HEADERS_TIMEOUT)
    assert client.wire.ended is None
    await client.wait(1)
    assert client.wire.ended == "closed"


@in_skipped_time
async def test_pipelined_headers_have_no_time_limit_during_a_response() -> None:
    client = Client(held=True)
    await client.send(GET % 1 + b"GET /2")
    await client.wait(5 * HEADERS_TIMEOUT)
    assert client.wire.ended is None
    await client.go()
    await client.wait(HEADERS_TIMEOUT + 1)
    assert (client.wire.ended, client.statuses) == ("closed", [200])


@in_skipped_time
async def test_a_client_that_does_not_read_its_response_is_disconnected() -> None:
    client = Client()
    client.wire.unread = 100
    await client.send(GET % 1)
    with capture_logs() as log:
        await client.wait(int(RESPONSE_TIMEOUT) + 1)
    assert client.wire.ended == "aborted"
    assert [(entry["event"], entry["seconds"]) for entry in log] == [
        ("answer_not_taken", RESPONSE_TIMEOUT)
    ]


@in_skipped_time
async def test_a_client_that_reads_slowly_gets_its_response() -> None:
    client = Client()
    await client.send(GET % 1)
    for unread in range(100, 90, -1):
        client.wire.unread = unread
        await client.wait(int(RESPONSE_TIMEOUT) - 1)
    client.wire.unread = 0
    await client.wait(1000)
    assert client.wire.ended is None


@in_skipped_time
async def test_the_rest_of_a_body_after_its_response_has_ten_seconds() -> None:
    stalls, ends = Client(reads=False), Client(reads=False)
    for client in (stalls, ends):
        await client.send(POST % (1, 100) + b"a")
        assert client.statuses == [200]
    await ends.send(b"b" * 99 + GET % 2)
    for client in (stalls, ends):
        await client.wait(HEADERS_TIMEOUT + 1)
    assert (stalls.wire.ended, ends.wire.ended) == ("closed", None)
    assert ends.app.paths == ["/1", "/2"]


# Sizes and order.


@in_skipped_time
async def test_pipelined_requests_are_limited() -> None:
    client = Client(held=True)
    await client.send(b"".join(GET % number for number in range(1000)))
    assert len(client.protocol.pipeline) == MAX_PIPELINED_REQUESTS
    await client.go()
    await run_ready(2000)
    assert client.statuses == [200] * (MAX_PIPELINED_REQUESTS + 1)
    assert client.wire.sent_eof


@pytest.mark.parametrize("size", [1, 65_000, 100_000])
@pytest.mark.parametrize("length", [MAX_HEADER_BYTES - 1000, MAX_HEADER_BYTES + 2000])
@in_skipped_time
async def test_headers_over_64_kib_get_431_however_they_are_split(size: int, length: int) -> None:
    client = Client()
    line = b"X-A: " + b"a" * (length - 40) + b"\r\n"
    await client.send_in_pieces(b"GET / HTTP/1.1\r\nHost: a\r\n" + line + b"\r\n", size)
    if length <= MAX_HEADER_BYTES:
        assert client.statuses == [200]
    else:
        assert (client.statuses, client.error["code"]) == ([431], "headers_too_large")
        assert client.wire.sent_eof
        assert client.app.paths == []


@in_skipped_time
async def test_the_headers_of_pipelined_requests_are_limited_separately() -> None:
    client = Client()
    large = b"GET / HTTP/1.1\r\nX-A: " + b"a" * 40_000 + b"\r\n\r\n"
    for _ in range(3):
        await client.send(large)
        await client.send(POST % (1, 50_000) + b"b" * 50_000)
    assert client.statuses == [200] * 6


@in_skipped_time
async def test_trailers_are_limited_and_never_become_headers() -> None:
    client = Client()
    await client.send(CHUNKED % 1 + b"1\r\nx\r\n0\r\nX-Request-ID: trailer\r\n\r\n" + GET % 2)
    first, second = client.app.headers
    assert [name for name, _ in first] == [b"host", b"transfer-encoding"]
    assert second == [(b"host", b"a")]
    await client.send(CHUNKED % 3 + b"0\r\nX-A: ")
    await client.send(b"a" * (MAX_HEADER_BYTES + 1))
    assert client.statuses[-1] == 431


@in_skipped_time
async def test_malformed_http_gets_400_and_the_rest_is_dropped() -> None:
    client = Client()
    with capture_logs() as log:
        await client.send(GET % 1)
        await client.send(b"what?\r\n\r\n" + GET % 2)
        await client.send(GET % 3)
    assert [(entry["event"], entry["client"]) for entry in log] == [
        ("malformed_request", "192.0.2.1")
    ]
    assert (client.app.paths, client.statuses) == (["/1"], [200, 400])
    head, _, body = client.wire.written.rpartition(b"HTTP/1.1 ")[2].partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    assert status == "400 Bad Request"
    assert sorted(lines) == [
        "connection: close",
        f"content-length: {len(body)}",
        "content-type: application/json",
        f"x-request-id: {client.error['request_id']}",
    ]
    assert client.error["code"] == "malformed_request"
    assert client.wire.sent_eof


@in_skipped_time
async def test_malformed_http_after_a_request_closes_the_connection_after_its_response() -> None:
    client = Client(held=True)
    await client.send(GET % 1 + GET % 2 + b"what?\r\n\r\n" + GET % 3)
    await client.send(b"what?\r\n\r\n")
    assert client.statuses == []
    await client.go()
    assert (client.app.paths, client.statuses) == (["/1", "/2"], [200, 200])
    assert client.wire.sent_eof


@in_skipped_time
async def test_a_malformed_chunked_body_ends_its_request() -> None:
    waiting, answering = Client(), Client(reads=False, streams=True)
    for client in (waiting, answering):
        for part in (CHUNKED % 1, b"5\r\nabcde\r\n", b"zz\r\n"):
            await client.send(part)
    assert (waiting.app.left, waiting.statuses) == (["/1"], [400])
    assert (answering.wire.ended, answering.statuses) == ("aborted", [200]), "no error within it"


# Upgrades.

H2C = b"Connection: Upgrade, HTTP2-Settings, keep-alive\r\nUpgrade: h2c\r\nHTTP2-Settings: a\r\n"
WEBSOCKET = b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
LENGTH = b"Content-Length: 12\r\n\r\nhello world!"
CHUNKS = b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n7\r\n world!\r\n0\r\n\r\n"


@pytest.mark.parametrize("step", [1, 100_000])
@pytest.mark.parametrize(
    ("offer", "framed"),
    [
        pytest.param(H2C, CHUNKS, id="h2c, chunked"),
        pytest.param(H2C + b"Expect: 100-continue\r\n", LENGTH, id="h2c, expects"),
        pytest.param(b"Connection: Upgrade\r\nUpgrade: h2c, foo/2\r\n", LENGTH, id="two"),
        pytest.param(WEBSOCKET, LENGTH, id="websocket"),
    ],
)
@in_skipped_time
async def test_an_h2c_upgrade_is_ignored_however_the_request_is_split(offer, framed, step) -> None:
    client, request = Client(), b"POST /1 HTTP/1.1\r\nHost: a\r\n" + offer + framed
    sent = request + GET % 2 + request
    for start in range(0, len(sent), step):
        await client.send(sent[start : start + step])
    assert client.app.bodies == [b"hello world!", b"", b"hello world!"]
    assert client.app.paths == ["/1", "/2", "/1"]
    assert (100 in client.statuses) == (b"Expect" in offer)
    assert [status for status in client.statuses if status != 100] == [200] * 3
    assert b"upgrade" not in {name for name, _ in client.app.headers[0]}


@in_skipped_time
async def test_an_ignored_upgrade_changes_nothing_else() -> None:
    client, head = Client(), b"POST /1 HTTP/1.1\r\nHost: a\r\n" + H2C
    await client.send(head + b"Content-Length: 140000\r\n\r\n" + b"a" * 140_000)
    assert [len(body) for body in client.app.bodies] == [140_000]
    await client.send(head.replace(b"keep-alive", b"close") + LENGTH + GET % 3)
    assert (client.statuses, client.wire.sent_eof) == ([200, 200], True)
    client = Client()
    await client.send(head + b"Content-Length: 3\r\n" + LENGTH)
    assert (client.statuses, client.app.paths) == ([400], []), "of two lengths"
    await (client := Client()).send(b"CONNECT example.org:443 HTTP/1.1\r\nHost: a\r\n\r\n")
    assert (client.statuses, client.app.paths) == ([400], []), "it is no proxy"


# The end.


@in_skipped_time
async def test_a_closing_connection_reads_until_the_client_closes_or_for_ten_seconds() -> None:
    client = Client(reads=False)
    await client.send(b"POST /1 HTTP/1.1\r\nConnection: close\r\nContent-Length: 9999999\r\n\r\n")
    assert (client.statuses, client.wire.sent_eof) == ([200], True)
    await client.send(b"a" * 500_000)
    assert (client.wire.reading, client.wire.ended) == (True, None)
    await client.wait(HEADERS_TIMEOUT + 1)
    assert client.wire.ended == "closed"


@in_skipped_time
async def test_the_app_sees_that_its_connection_is_closing() -> None:
    client = Client(held=True)
    await client.send(GET % 1)
    (state,) = client.app.states
    assert not state["is_closing"]()
    client.wire.abort()
    assert state["is_closing"]()


@in_skipped_time
async def test_shutdown_closes_idle_connections_at_once_and_others_after_their_response() -> None:
    idle, busy = Client(), Client(held=True)
    await busy.send(GET % 1)
    for client in (idle, busy):
        client.protocol.shutdown()
    assert (idle.wire.ended, busy.wire.ended) == ("closed", None)
    await busy.go()
    assert busy.statuses == [200]
    assert busy.wire.sent_eof
