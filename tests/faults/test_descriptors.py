"""A process that has no descriptor left says so, and answers again as soon as it has some."""

import re
from contextlib import ExitStack
from pathlib import Path

import psutil

from tests.faults.raw import connect
from tests.support.server import run_server

ROOM = 20


def test_reaching_the_limit_is_logged(tiny_m3: Path, tmp_path: Path) -> None:
    with run_server(tmp_path, EMBEDDING_MODEL=str(tiny_m3)) as server:
        server.wait_until_healthy()
        process = psutil.Process(server.process.pid)
        limit = process.num_fds() + ROOM
        process.rlimit(psutil.RLIMIT_NOFILE, (limit, limit))
        with ExitStack() as stack:
            for _ in range(ROOM + 5):
                stack.enter_context(connect(server))
            server.wait_for_line("descriptor_limit_reached")
        # It closes those whose clients have left.
        server.wait_for_more(lambda: limit - process.num_fds(), 1)
        server.wait_until_healthy()
    assert len(re.findall("descriptor_limit_reached", server.log)) == 1
