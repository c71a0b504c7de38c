"""The system's clock is set: waits and timings must not notice.

Sent 8: 8 answered, 0 refused, 0 lost. Healthy before and after.
"""

import os
import time
from pathlib import Path

from tests.faults.tally import tally
from tests.support.server import REPOSITORY, RunningServer
from tests.support.waiting import wait_until

# Read by the interpreter before anything else: `time.time` is what the file `clock` says beside it.
# (The monotonic clock stays as it is, which is what setting a system's clock does.)
MOVABLE_CLOCK = """
import pathlib, time
_true, _file = time.time, pathlib.Path(__file__).with_name("clock")
time.time = lambda: _true() + float(_file.read_text() or 0)
"""
DAY = 86_400


def wait_until_moved(server: RunningServer, year: str) -> None:
    """The server's own Date header shows which time it believes in."""
    told = f"the server does not believe in {year}"
    wait_until(lambda: year in server.get("/health").headers["date"], told)


def test_a_clock_that_jumps_changes_no_wait_and_no_timing(serve, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(MOVABLE_CLOCK)
    clock = tmp_path / "clock"
    clock.write_text("0")
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    with (
        serve(PYTHONPATH=path) as server,
        tally(server) as counts,
        server.client() as client,
    ):
        for year in ("2061", "2001"):
            clock.write_text(str(seconds_until(int(year))))
            wait_until_moved(server, year)
            for _ in range(4):
                timings = counts.ask(client).json()["timings_ms"]
                assert all(0 <= ms < 60_000 for ms in timings.values()), timings
            assert 0 <= client.get("/stats").json()["uptime_seconds"] < 600
        assert counts.answered == 8


def seconds_until(year: int) -> float:
    """From now to the middle of `year`; negative for the past."""
    return (year - 1970) * 365.25 * DAY + 180 * DAY - time.time()
