"""Polls for conditions, and runs threads in the background."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

# Only a failing test waits so long: a loaded machine may need minutes to start a server.
LIMIT = 500.0


def wait_until(
    condition: Callable[[], object], otherwise: Callable[[], str] | str, pause: float = 0.02
) -> None:
    """Return once `condition` holds; fail at the limit, with the message `otherwise`."""
    deadline, never = time.monotonic() + LIMIT, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, otherwise() if callable(otherwise) else otherwise
        never.wait(pause)


@contextmanager
def running(
    threads: Sequence[threading.Thread], stop: threading.Event, seconds: float
) -> Iterator[None]:
    """Run threads within the block; then set `stop`, and wait `seconds` for each to end."""
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(seconds)
