"""Threads that put a load on a server until they are told to stop."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def running(
    threads: Sequence[threading.Thread], stop: threading.Event, seconds: float
) -> Iterator[None]:
    """Run them within the block; then set `stop` and wait so long for each to end."""
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(seconds)
