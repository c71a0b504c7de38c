"""A client that sends requests ahead gets every answer in order, and cannot fill the memory.

Sent 2,033 on 2 connections: 2,033 answered, 0 lost. A third one does not read, and is not read.
"""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil

from tests.faults.raw import connect, head, read_answers
from tests.support.server import RunningServer

LIVE = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
AHEAD = 2000
MIB = 1 << 20


def embed(number: int, padding: int = 0) -> bytes:
    body = json.dumps({"sentences": [f"{number}" + " " * padding], "return_colbert": False})
    return head(len(body)) + body.encode()


def memory(server: RunningServer) -> int:
    return psutil.Process(server.process.pid).memory_info().rss


def answers(raw: socket.socket, requests: bytes) -> Iterator[tuple[int, bytes]]:
    """Send everything, whether or not it is read, and yield what comes back."""
    with ThreadPoolExecutor(1) as sender:
        sent = sender.submit(raw.sendall, requests)
        yield from read_answers(raw)
        sent.result()


def test_sending_ahead_without_end_holds_no_memory(server) -> None:
    before = memory(server)
    with connect(server) as raw:
        statuses: list[int] = []
        for status, _ in answers(raw, LIVE * AHEAD):
            statuses.append(status)
            if len(statuses) == AHEAD // 2:
                assert server.get("/health").status_code == 200
            if len(statuses) % 100 == 0:
                assert memory(server) - before < 20 * MIB
            if len(statuses) == AHEAD:
                break
        assert statuses == [200] * AHEAD


def test_who_sends_ahead_and_does_not_read_holds_no_memory(server) -> None:
    """The system's buffers are full at last, and then the client waits as the server does."""
    before = memory(server)
    with connect(server, receive_buffer=4096) as raw:
        raw.settimeout(2)
        sent = 0
        try:
            while sent < 64 * MIB:
                sent += raw.send(LIVE * 1000)
        except TimeoutError:
            pass
        assert sent < 64 * MIB
        assert memory(server) - before < 20 * MIB
        assert server.get("/health").status_code == 200


def test_requests_sent_ahead_are_answered_in_order_whatever_their_size(server) -> None:
    """Bodies over the amount at which reading pauses, and small ones, in one stream."""
    sizes = [0, 200_000, 3, 70_000, 0, 0, 65_536, 1] * 4
    requests = b"".join(embed(number, size) for number, size in enumerate(sizes))
    with connect(server) as raw:
        texts: list[str] = []
        for status, body in answers(raw, requests + LIVE):
            if len(texts) == len(sizes):
                assert (status, json.loads(body)["status"]) == (200, "alive")
                break
            assert status == 200
            texts.append(json.loads(body)["data"][0]["text"])
        assert texts == [f"{number}" + " " * size for number, size in enumerate(sizes)]
