"""What lies between a connection and its socket: timers, flow control and a lingering close."""

import asyncio
import socket

import pytest

from smart_embedder.server.connection import (
    LINGER_TIMEOUT,
    BoundedFlowControl,
    LingeringTransport,
    Timer,
    has_hung_up,
)
from tests.server.test_connection import Wire, pair
from tests.support.skipped_time import in_skipped_time, now


@in_skipped_time
async def test_a_timer_runs_once_from_its_first_start() -> None:
    timer, began, rang = Timer(asyncio.get_running_loop()), now(), list[float]()
    timer.start(10, lambda: rang.append(now() - began))
    await asyncio.sleep(5)
    timer.start(10, lambda: rang.append(-1.0))
    await asyncio.sleep(100)
    assert rang == [pytest.approx(10, abs=0.01)]
    timer.start(1, lambda: rang.append(now() - began))
    await asyncio.sleep(100)
    assert rang[1:] == [pytest.approx(106, abs=0.01)]


@in_skipped_time
async def test_a_timer_that_is_cancelled_does_not_ring_and_can_be_started_again() -> None:
    timer, rang = Timer(asyncio.get_running_loop()), list[str]()
    timer.start(10, lambda: rang.append("first"))
    timer.cancel()
    timer.cancel()
    timer.start(10, lambda: rang.append("second"), grace=1)
    await asyncio.sleep(10.5)
    assert rang == [], "the time is over, and what arrived meanwhile may be read yet"
    timer.cancel()
    await asyncio.sleep(100)
    assert rang == []
    timer.start(10, lambda: rang.append("third"), grace=1)
    await asyncio.sleep(11.5)
    assert rang == ["third"]


@in_skipped_time
async def test_a_lingering_close_sends_the_end_and_reads_on_for_a_while() -> None:
    wire = Wire()
    transport = LingeringTransport(wire, asyncio.get_running_loop())
    transport.pause_reading()
    assert not wire.reading
    transport.resume_reading()
    assert wire.reading
    transport.pause_reading()
    transport.write(b"answer")
    transport.close()
    assert (wire.sent_eof, wire.reading, wire.ended) == (True, True, None)
    assert transport.is_closing()
    transport.write(b"more")
    transport.pause_reading()
    assert (wire.written, wire.reading) == (b"answer", True)
    await asyncio.sleep(LINGER_TIMEOUT - 1)
    transport.close()
    assert wire.ended is None
    await asyncio.sleep(1.1)
    assert wire.ended == "closed"


@in_skipped_time
async def test_what_has_closed_does_not_linger() -> None:
    wire = Wire()
    transport = LingeringTransport(wire, asyncio.get_running_loop())
    assert not transport.is_closing()
    wire.close()
    assert transport.is_closing()
    transport.close()
    assert not wire.sent_eof


@in_skipped_time
async def test_a_client_that_is_gone_before_the_end_is_sent_is_no_error() -> None:
    class Gone(Wire):
        def write_eof(self) -> None:
            raise OSError

    wire = Gone()
    transport = LingeringTransport(wire, asyncio.get_running_loop())
    transport.close()
    assert transport.is_closing()
    transport.close_without_lingering()
    assert wire.ended == "closed"


@in_skipped_time
async def test_flow_control_reads_on_where_there_is_room_and_never_after_its_connection() -> None:
    wire, room = Wire(), [False]
    flow = BoundedFlowControl(wire, lambda: room[0])
    flow.pause_reading()
    flow.resume_reading()
    assert not wire.reading
    room[0] = True
    flow.resume_reading()
    assert wire.reading
    flow.pause_reading()
    flow.detach()
    flow.resume_reading()
    assert not wire.reading


def test_who_has_hung_up_is_known_without_reading() -> None:
    near, far = pair()
    with near, far:
        far.sendall(b"unread")
        assert not has_hung_up(near)
        far.shutdown(socket.SHUT_WR)
        assert has_hung_up(near)
    assert not has_hung_up(None)


async def test_it_tells_of_its_connection_what_the_one_below_tells() -> None:
    wire = Wire()
    transport = LingeringTransport(wire, asyncio.get_running_loop())
    assert transport.get_extra_info("peername") == ("192.0.2.1", 7)
    assert transport.get_extra_info("cipher", "none") == "none"
    wire.unread = 7
    assert transport.get_write_buffer_size() == 7
    transport.abort()
    assert wire.ended == "aborted"
