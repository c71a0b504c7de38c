"""What lies between a connection and its socket, and HTTP as bytes, where no app answers."""

import asyncio
import socket

import pytest

from smart_embedder.server.connection import (
    LINGER_TIMEOUT,
    BoundedFlowControl,
    LingeringTransport,
    has_event,
    head_without_upgrade,
)
from tests.server.wire import Wire, pair
from tests.support.skipped_time import in_skipped_time


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


class Gone(Wire):
    def write_eof(self) -> None:
        raise OSError


@in_skipped_time
async def test_what_has_closed_does_not_linger_and_a_client_that_is_gone_is_no_error() -> None:
    wire, gone = Wire(), Gone()
    closed, left = (LingeringTransport(w, asyncio.get_running_loop()) for w in (wire, gone))
    assert not closed.is_closing()
    wire.close()
    assert closed.is_closing()
    closed.close()
    assert not wire.sent_eof
    left.close()
    assert left.is_closing()
    left.close_without_lingering()
    assert gone.ended == "closed"


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
        assert not has_event(near, "POLLRDHUP")
        far.shutdown(socket.SHUT_WR)
        assert has_event(near, "POLLRDHUP")
    assert not has_event(None, "POLLRDHUP")


# HTTP as bytes, where no app answers.


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ([(b"connection", b"Upgrade"), (b"upgrade", b"h2c")], []),
        ([(b"connection", b"keep-alive, Upgrade")], [b"connection: keep-alive"]),
        ([(b"connection", b"close,HTTP2-Settings , x")], [b"connection: close, x"]),
        ([(b"http2-settings", b"AAM"), (b"host", b"a")], [b"host: a"]),
        ([(b"connection", b""), (b"x-empty", b"")], [b"connection: ", b"x-empty: "]),
    ],
)
def test_only_the_offer_to_upgrade_is_left_out_of_a_head(sent, kept) -> None:
    lines = [b"POST /a?b HTTP/1.1", *kept, b"", b""]
    assert head_without_upgrade(b"POST", b"/a?b", "1.1", sent) == b"\r\n".join(lines)
