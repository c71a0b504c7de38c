"""Clients that ask for much and do not read it lose their answer, and nobody else loses anything.

Two whose readers never come, beside twenty that behave: sent 63, answered 61, left 2, refused 0,
lost 0. Healthy before and after.
"""

import json
import socket
from concurrent.futures import ThreadPoolExecutor

from tests.faults.raw import connect, head
from tests.faults.tally import Tally, tally
from tests.support.server import RunningServer

# ColBERT vectors, more than the 16 MB of unread answers that this server holds.
ANSWER_BYTES = 18_000_000
BODY = json.dumps({"sentences": ["search vector " * 50] * 256}).encode()
CLIENTS = 20


def ask_and_not_read(server: RunningServer, counts: Tally) -> socket.socket:
    raw = connect(server, receive_buffer=4096)
    raw.sendall(head(len(BODY)) + BODY)
    counts.leave()
    assert raw.recv(12) == b"HTTP/1.1 200"
    return raw


def behave(server: RunningServer, counts: Tally) -> None:
    with server.client() as client:
        for _ in range(3):
            answer = counts.ask(client)
            assert answer is not None
            assert answer.status_code == 200, answer.text


def test_two_that_do_not_read_cost_nobody_an_answer(impatient) -> None:
    with tally(impatient) as counts, ThreadPoolExecutor(CLIENTS) as clients:
        readers = [ask_and_not_read(impatient, counts) for _ in range(2)]
        for done in [clients.submit(behave, impatient, counts) for _ in range(CLIENTS)]:
            done.result()
        impatient.wait_for_metric("embedding_active_requests", 0)
        for raw in readers:
            with raw:
                assert is_cut_off(raw)
        assert counts.answered == 3 * CLIENTS
    assert "unread answers fill the memory" in impatient.log


def is_cut_off(raw: socket.socket) -> bool:
    """Whether the connection ends before the whole answer is there."""
    received = 12
    try:
        while chunk := raw.recv(1 << 20):
            received += len(chunk)
    except ConnectionResetError:
        pass
    return received < ANSWER_BYTES


def test_who_reads_in_small_pieces_gets_everything(impatient) -> None:
    with tally(impatient) as counts, connect(impatient, receive_buffer=65_536) as raw:
        raw.sendall(head(len(BODY), "/embeddings/") + BODY)
        counts.note(int(raw.recv(12).split()[1]))
        received = 12
        while received < ANSWER_BYTES:
            received += len(raw.recv(16_384))
        assert counts.answered == 1
