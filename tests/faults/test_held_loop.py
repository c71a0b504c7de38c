"""Code that holds the event loop is named in the log; a process that was stopped blames none.

Sent 1 that holds it: answered.
"""

import json
import signal
import time
from pathlib import Path
from threading import Event

import pytest

from tests.support.server import RunningServer, run_server

SERIES = "embedder_event_loop_blocked_seconds"
PAUSE = Event()
STOPPED_FOR = 1.0


@pytest.fixture
def held(tiny_m3: Path, tmp_path: Path):
    module, settings = "tests.faults.held_loop_server", {"EMBEDDING_MODEL": str(tiny_m3)}
    with run_server(tmp_path, module, LOG_FORMAT="json", **settings) as server:
        server.wait_until_healthy()
        yield server


def warnings_of(server: RunningServer, event: str) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in server.lines if event in line]
    return [line for line in lines if line["event"] == event]


def test_it_is_counted_and_named_and_a_stop_is_told_apart(held: RunningServer) -> None:
    with held.client() as client:
        client.post("/hold", content=b"0.5").raise_for_status()
    held.wait_for_line("event_loop_blocked")
    named = warnings_of(held, "event_loop_blocked")
    calls = str(named[0]["stack"]).splitlines()
    assert " compute" in calls[0]
    assert " hold" in calls[1]
    assert any("smart_embedder.middleware" in call for call in calls)
    assert named[0]["level"] == "warning"
    shown = dict(line.rsplit(" ", 1) for line in held.get("/metrics").text.splitlines())
    blocked = float(shown[f"{SERIES}_sum"])
    assert blocked >= 0.4
    assert float(shown[f"{SERIES}_count"]) > float(shown[f'{SERIES}_bucket{{le="0.25"}}'])

    before = len(warnings_of(held, "event_loop_blocked"))
    held.get("/health")  # It is watched closely for a second.
    began = time.monotonic()
    held.process.send_signal(signal.SIGSTOP)
    try:
        while time.monotonic() - began < STOPPED_FOR:
            PAUSE.wait(0.05)
    finally:
        held.process.send_signal(signal.SIGCONT)
    held.wait_for_line("process_stalled")
    (stalled, *_) = warnings_of(held, "process_stalled")
    assert "stack" not in stalled
    assert len(warnings_of(held, "event_loop_blocked")) == before
    assert held.metric(f"{SERIES}_sum") > blocked
