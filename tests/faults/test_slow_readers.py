"""Clients that do not read a large answer lose it, and nobody else loses anything."""

import socket
from concurrent.futures import ThreadPoolExecutor

from tests.faults.attacks import LARGE
from tests.faults.raw import connect, head
from tests.faults.tally import Tally, tally
from tests.support.server import RunningServer

ANSWER_BYTES = 18_000_000
CLIENTS = 20


def behave(server: RunningServer, counts: Tally) -> None:
    with server.client() as client:
        for _ in range(3):
            answer = counts.ask(client)
            assert answer is not None
            assert answer.status_code == 200, answer.text


def test_three_that_do_not_read_are_cut_off_and_cost_nobody_an_answer(impatient) -> None:
    with tally(impatient) as counts, ThreadPoolExecutor(CLIENTS) as clients:
        readers = [connect(impatient, receive_buffer=4096) for _ in range(3)]
        for raw in readers:
            raw.sendall(head(len(LARGE)) + LARGE)
            counts.note(int(raw.recv(12).split()[1]))
        for done in [clients.submit(behave, impatient, counts) for _ in range(CLIENTS)]:
            done.result()
        impatient.wait_for_line("answer_not_taken")
        impatient.wait_for_metric("embedding_active_requests", 0)
        for raw in readers:
            with raw:
                assert is_cut_off(raw)
        assert counts.answered == 3 + 3 * CLIENTS


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
        raw.sendall(head(len(LARGE), "/embeddings/") + LARGE)
        counts.note(int(raw.recv(12).split()[1]))
        received = 12
        while received < ANSWER_BYTES:
            received += len(raw.recv(16_384))
        assert counts.answered == 1
