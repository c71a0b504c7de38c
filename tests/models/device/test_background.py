"""Threads that leave the processor to others."""

import os
import sys
import threading

import pytest

from app.models.device.background import run_in_background


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
def test_only_the_thread_itself_steps_back() -> None:
    seen: list[int] = []

    def look() -> None:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    before = os.getpriority(os.PRIO_PROCESS, 0)
    run_in_background(look, "look", daemon=True).join()
    assert seen == [19]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


@pytest.mark.parametrize("daemon", [False, True])
def test_it_is_a_daemon_as_asked_for_whoever_starts_it(daemon: bool) -> None:
    started: list[threading.Thread] = []

    def start() -> None:
        started.append(run_in_background(lambda: None, "inner", daemon=daemon))

    run_in_background(start, "outer", daemon=True).join()
    started[0].join()
    assert started[0].daemon is daemon
    assert started[0].name == "inner"
