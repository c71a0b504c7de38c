"""Clients that stop, leave, flood, or send what is no HTTP cost nobody else an answer or memory."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import psutil

from tests.faults.raw import connect, head, is_closed, read_answers, read_status
from tests.faults.tally import GOOD, tally
from tests.support.server import RunningServer

LIVE = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
BEGINNINGS = [b"POST /embeddings/ HTTP/1.1\r\nHost: localh"] * 200 + [b"", b"\r\n"] * 20
MIB = 1 << 20


def test_half_open_connections_stop_nobody(impatient) -> None:
    with tally(impatient) as counts, ExitStack() as stack:
        for beginning in BEGINNINGS:
            stack.enter_context(connect(impatient)).sendall(beginning)
        for _ in range(20):
            with impatient.client(headers={"Connection": "close"}) as client:
                counts.ask(client)
        assert counts.answered == 20


def test_who_leaves_in_the_middle_of_a_body_costs_nobody_an_answer(impatient) -> None:
    body = json.dumps(GOOD).encode()
    with tally(impatient) as counts, impatient.client() as client:
        for number in range(50):
            with connect(impatient) as raw:
                raw.sendall(head(len(body)) + body[: number % len(body)])
                counts.leave()
            if number % 5 == 0:
                counts.ask(client)
        assert counts.answered == 10


def test_sixteen_stalled_uploads_cost_nobody_else_anything_and_are_told_so(impatient) -> None:
    """Each stops before its last byte: 408, or 503 where one client's bodies are too many."""
    body = json.dumps({"sentences": ["search"], "padding": " " * 990_000}).encode()

    def behave() -> None:
        with impatient.client() as client:
            for _ in range(4):
                assert counts.ask(client).status_code == 200

    with tally(impatient) as counts, ExitStack() as stack, ThreadPoolExecutor(10) as clients:
        stalled = [stack.enter_context(connect(impatient)) for _ in range(16)]
        for raw in stalled:
            raw.sendall(head(len(body)) + body[:-1])
        for done in [clients.submit(behave) for _ in range(10)]:
            done.result()
        told = {408: "request_timeout", 503: "queue_full"}
        for raw in stalled:
            ((status, answer),) = read_answers(raw)  # And the connection ends.
            counts.note(status)
            assert json.loads(answer)["code"] == told[status]
        assert counts.statuses[408] >= 8
        assert counts.answered == 40


def test_a_flood_of_what_is_no_http_writes_a_line_now_and_then(server: RunningServer) -> None:
    written = len(server.log)
    for _ in range(300):
        with connect(server) as raw:
            raw.sendall(b"\x16\x03\x01 this is not HTTP\r\n\r\n")
            ((status, body),) = read_answers(raw)
        assert (status, json.loads(body)["code"]) == (400, "malformed_request")
        assert json.loads(body)["request_id"]
    assert len(server.log) - written < 5_000
    assert "malformed_request" in server.log


def test_headers_of_a_megabyte_in_one_write_are_told_so(server: RunningServer) -> None:
    with connect(server) as raw:
        raw.sendall(LIVE[:-2] + b"X-Long: " + b"x" * MIB + b"\r\n\r\n")
        assert read_status(raw) == 431
        assert is_closed(raw)


def memory(server: RunningServer) -> int:
    return psutil.Process(server.process.pid).memory_info().rss


def test_sending_ahead_without_end_holds_no_memory(server: RunningServer) -> None:
    before, ahead = memory(server), 2000

    def answers() -> Iterator[int]:
        with ThreadPoolExecutor(1) as sender:
            sent = sender.submit(raw.sendall, LIVE * ahead)
            for _, (status, _) in zip(range(ahead), read_answers(raw), strict=False):
                yield status
            sent.result()

    with connect(server) as raw:
        for number, status in enumerate(answers()):
            assert status == 200
            if number % 100 == 0:
                assert memory(server) - before < 20 * MIB
        assert number == ahead - 1


def test_who_sends_ahead_and_does_not_read_holds_no_memory(server: RunningServer) -> None:
    """The system's buffers are full at last, and then the client waits as the server does."""
    before, sent = memory(server), 0
    with connect(server, receive_buffer=4096) as raw:
        raw.settimeout(1)
        with suppress(TimeoutError):
            while sent < 64 * MIB:
                sent += raw.send(LIVE * 1000)
        assert sent < 64 * MIB
        assert memory(server) - before < 20 * MIB
        assert server.get("/health").status_code == 200
