"""A process that has no descriptor left says so, and answers again as soon as it has some."""

import re
from contextlib import ExitStack

import psutil

from tests.faults.raw import connect

ROOM = 20


def test_reaching_the_limit_is_logged_and_shown_in_the_metrics(serve) -> None:
    """Prometheus keeps its connection; counting files needs a descriptor, and there is none."""
    with serve() as server, server.client() as prometheus:
        assert prometheus.get("/metrics").status_code == 200
        process = psutil.Process(server.process.pid)
        limit = process.num_fds() + ROOM
        process.rlimit(psutil.RLIMIT_NOFILE, (limit, limit))
        with ExitStack() as stack:
            for _ in range(ROOM + 5):
                stack.enter_context(connect(server))
            server.wait_for_line("descriptor_limit_reached")
            shown = prometheus.get("/metrics").text
            values = dict(re.findall(r"^process_(open|max)_fds (\S+)$", shown, re.MULTILINE))
            assert {name: float(value) for name, value in values.items()} == {
                "open": limit,
                "max": limit,
            }
        # It closes those whose clients have left.
        server.wait_for_more(lambda: limit - process.num_fds(), 1)
        server.wait_until_healthy()
    assert len(re.findall("descriptor_limit_reached", server.log)) == 1
