"""Work that leaves the processor to whoever else wants it."""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

_LOWEST = 19


def run_in_background(work: Callable[[], None], name: str, *, daemon: bool) -> threading.Thread:
    """Start `work` on a thread of its own, on Linux of the lowest priority.

    It should seldom run Python: whoever wants the lock that it holds waits until it gets a turn.
    """

    def run() -> None:
        if sys.platform == "linux":  # Elsewhere that would be the whole process's priority.
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
        work()

    thread = threading.Thread(target=run, name=name, daemon=daemon)
    thread.start()
    return thread
