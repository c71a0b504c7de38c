"""Clients that ask for much and do not read it.

One whose reader never comes is cut off; those that come meanwhile are refused (503) as long as the
unread answer fills the memory, and answered afterwards; 0 lost. Healthy before and after.
"""

import json
import socket
from threading import Event

from tests.faults.raw import connect, head
from tests.faults.tally import tally

# ColBERT vectors, more than the 16 MB that this server lets clients hold.
ANSWER_BYTES = 18_000_000
BODY = json.dumps({"sentences": ["search vector " * 50] * 256}).encode()


def test_an_unread_answer_is_given_up_and_its_memory_let_go(impatient) -> None:
    with (
        tally(impatient) as counts,
        impatient.client() as client,
        connect(impatient, receive_buffer=4096) as raw,
    ):
        raw.sendall(head(len(BODY)) + BODY)
        counts.leave()
        assert raw.recv(12) == b"HTTP/1.1 200"
        refused = counts.ask(client)
        assert refused is not None
        assert (refused.status_code, refused.json()["code"]) == (503, "queue_full")
        assert refused.headers["retry-after"] == "1"
        pause = Event()
        while counts.ask(client).status_code == 503:
            pause.wait(0.2)
        assert is_cut_off(raw)
        assert "answer_not_taken" in impatient.log


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
