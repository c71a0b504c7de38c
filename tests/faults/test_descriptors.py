"""A process that has no descriptor left says so, and answers again as soon as it has some."""

import re
from contextlib import ExitStack

import psutil

from tests.faults.raw import connect

ROOM = 20


def test_reaching_the_limit_is_logged(serve) -> None:
    with serve() as server:
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
