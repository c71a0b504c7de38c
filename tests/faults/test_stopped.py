"""A process that was stopped for longer than its patience answers what came meanwhile.

Sent 40 on kept connections: 40 answered, 0 lost.
"""

import signal
import time
from contextlib import ExitStack
from threading import Event

import psutil

from tests.faults.raw import connect, read_answers
from tests.faults.test_pipelining import LIVE
from tests.support.server import run_server

CONNECTIONS = 20
PAUSE = Event()
LONGER_THAN_KEEP_ALIVE = 5.5


def test_requests_on_kept_connections_that_came_while_it_was_stopped(tmp_path) -> None:
    with (
        run_server(tmp_path, "tests.faults.plain_server", fresh=True) as server,
        ExitStack() as stack,
    ):
        kept = [stack.enter_context(connect(server)) for _ in range(CONNECTIONS)]
        for raw in kept:
            raw.sendall(LIVE)
            assert next(read_answers(raw))[0] == 200
        began = time.monotonic()
        server.process.send_signal(signal.SIGSTOP)
        try:
            while psutil.Process(server.process.pid).status() != psutil.STATUS_STOPPED:
                PAUSE.wait(0.01)
            for raw in kept:
                raw.sendall(LIVE)
            while time.monotonic() - began < LONGER_THAN_KEEP_ALIVE:
                PAUSE.wait(0.1)
        finally:
            server.process.send_signal(signal.SIGCONT)
        statuses = [next(read_answers(raw))[0] for raw in kept]
        assert statuses == [200] * CONNECTIONS
