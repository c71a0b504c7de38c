"""Clients that connect and never come to the point.

Sent 41, beside 240 connections that never send a request: 20 answered, 21 refused (20 unknown paths
whose bodies never end, 1 head too large), 0 lost. Healthy before and after.
"""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from tests.faults.raw import connect, head, is_closed, read_status
from tests.faults.tally import tally

BEGINNINGS = [
    *[b"POST /embeddings/ HTTP/1.1\r\nHost: localh"] * 200,
    *[b""] * 20,
    *[b"\r\n"] * 20,
]
LIVE = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
# Seconds, longer than clients keep an idle connection.
IDLE = 6


@dataclass(frozen=True, slots=True)
class Connections:
    """Those that are waited for, all at once, and since when."""

    half_open: list[socket.socket]
    answered: list[socket.socket]
    statuses: list[int]
    idle: socket.socket
    since: float


@pytest.fixture(scope="module")
def connections(impatient) -> Iterator[Connections]:
    with ExitStack() as stack:
        half_open = [stack.enter_context(connect(impatient)) for _ in BEGINNINGS]
        for raw, beginning in zip(half_open, BEGINNINGS, strict=True):
            raw.sendall(beginning)
        answered = [stack.enter_context(connect(impatient)) for _ in range(20)]
        statuses = [answer_before_the_end(raw) for raw in answered]
        idle = stack.enter_context(connect(impatient))
        idle.sendall(LIVE)
        assert read_status(idle) == 200
        yield Connections(half_open, answered, statuses, idle, time.monotonic())


def answer_before_the_end(raw: socket.socket) -> int:
    """The status of a path that is not there; the body goes on after it."""
    raw.sendall(head(1000, path="/nowhere") + b"x" * 10)
    status = read_status(raw)
    raw.sendall(b"x" * 10)
    return status


def test_an_idle_connection_outlives_the_clients_that_keep_one_for_five_seconds(
    connections,
) -> None:
    left = IDLE - (time.monotonic() - connections.since)
    connections.idle.settimeout(max(left, 0.01))
    assert not is_closed(connections.idle)
    connections.idle.settimeout(60)
    connections.idle.sendall(LIVE)
    assert read_status(connections.idle) == 200


def test_half_open_connections_stop_nobody_and_are_gone_after_a_while(
    impatient, connections
) -> None:
    with tally(impatient) as counts:
        for _ in range(20):
            with impatient.client(headers={"Connection": "close"}) as client:
                counts.ask(client)
        assert counts.answered == 20
        assert all(is_closed(raw) for raw in connections.half_open)


def test_a_body_that_goes_on_after_the_answer_does_not_go_on_for_ever(
    impatient, connections
) -> None:
    with tally(impatient) as counts:
        for status in connections.statuses:
            counts.note(status)
        assert dict(counts.statuses) == {404: 20}
        assert all(is_closed(raw) for raw in connections.answered)


def test_a_head_without_end_is_431(impatient) -> None:
    with tally(impatient) as counts, connect(impatient) as raw:
        raw.sendall(b"POST /embeddings/ HTTP/1.1\r\nX-Long: ")
        for _ in range(9):
            raw.sendall(b"x" * 8192)
        counts.note(read_status(raw))
        assert dict(counts.statuses) == {431: 1}
