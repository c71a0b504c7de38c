"""Clients that ask for much and do not read it lose their answer, and nobody else loses anything.

Three whose readers never come, beside twenty that behave: answered 61, left 3, lost 0; refused are
only further large answers, until one that is not read has stalled for a second. Healthy before and
after.
"""

import json
import socket
from concurrent.futures import ThreadPoolExecutor

from tests.faults.raw import connect, head
from tests.faults.tally import Tally, tally
from tests.support.server import RunningServer

# ColBERT vectors. Each answer holds 7 MB of them, and this server at most 24 for all.
ANSWER_BYTES = 18_000_000
BODY = json.dumps({"sentences": ["search vector " * 50] * 256}).encode()
CLIENTS = 20


def ask_and_not_read(server: RunningServer, counts: Tally) -> socket.socket:
    """An answer that is not read, asked for until there is room for it."""
    while True:
        raw = connect(server, receive_buffer=4096)
        raw.sendall(head(len(BODY)) + BODY)
        status = int(raw.recv(12).split()[1])
        if status == 200:
            counts.leave()
            return raw
        raw.close()
        counts.note(status)
        assert status == 503


def behave(server: RunningServer, counts: Tally) -> None:
    with server.client() as client:
        for _ in range(3):
            answer = counts.ask(client)
            assert answer is not None
            assert answer.status_code == 200, answer.text


def test_three_that_do_not_read_cost_nobody_an_answer(impatient) -> None:
    with tally(impatient) as counts, ThreadPoolExecutor(CLIENTS) as clients:
        readers = [ask_and_not_read(impatient, counts) for _ in range(3)]
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
