"""Clients that connect and never come to the point.

Sent 41, beside 240 connections that never send a request: 20 answered, 21 refused (20 unknown paths
whose bodies never end, 1 head too large), 0 lost. Healthy before and after.
"""

from contextlib import ExitStack

from tests.faults.raw import connect, head, is_closed, read_status
from tests.faults.tally import tally


def test_half_open_connections_stop_nobody_and_are_gone_after_a_while(impatient) -> None:
    beginnings = [b"POST /embeddings/ HTTP/1.1\r\nHost: localh"] * 200
    beginnings += [b""] * 20 + [b"\r\n"] * 20
    with tally(impatient) as counts, ExitStack() as stack:
        waiting = [stack.enter_context(connect(impatient)) for _ in beginnings]
        for raw, beginning in zip(waiting, beginnings, strict=True):
            raw.sendall(beginning)
        for _ in range(20):
            with impatient.client(headers={"Connection": "close"}) as client:
                counts.ask(client)
        assert counts.answered == 20
        assert all(is_closed(raw) for raw in waiting)


def test_a_body_that_goes_on_after_the_answer_does_not_go_on_for_ever(impatient) -> None:
    with tally(impatient) as counts, ExitStack() as stack:
        sending = [stack.enter_context(connect(impatient)) for _ in range(20)]
        for raw in sending:
            raw.sendall(head(1000, path="/nowhere") + b"x" * 10)
            counts.note(read_status(raw))
            raw.sendall(b"x" * 10)
        assert dict(counts.statuses) == {404: 20}
        assert all(is_closed(raw) for raw in sending)


def test_a_head_without_end_is_431(impatient) -> None:
    with tally(impatient) as counts, connect(impatient) as raw:
        raw.sendall(b"POST /embeddings/ HTTP/1.1\r\nX-Long: ")
        for _ in range(9):
            raw.sendall(b"x" * 8192)
        counts.note(read_status(raw))
        assert dict(counts.statuses) == {431: 1}


def test_an_idle_connection_outlives_the_clients_that_keep_one_for_five_seconds(impatient) -> None:
    live = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connect(impatient) as raw:
        raw.sendall(live)
        assert read_status(raw) == 200
        raw.settimeout(6)
        assert not is_closed(raw)
        raw.sendall(live)
        assert read_status(raw) == 200
