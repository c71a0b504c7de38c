"""One start at a time installs: two that write into one environment leave it broken."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from launcher.console import say

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_SECONDS_BETWEEN_TRIES = 0.5


@contextmanager
def exclusive(file: Path, work: str) -> Iterator[int | None]:
    """Hold the lock of `file` while the block runs; say so where another start has it.

    Yields the descriptor that holds it: a child process that inherits it keeps the lock when this
    process is killed. None where the file cannot be made: then nothing can be installed either.
    """
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        yield None
        return
    try:
        _wait(descriptor, work)
        yield descriptor
    finally:
        os.close(descriptor)


def _wait(descriptor: int, work: str) -> None:
    if _take(descriptor):
        return
    say(f"Another start is {work}: waiting until it has finished ...")
    while not _take(descriptor):
        time.sleep(_SECONDS_BETWEEN_TRIES)


def _take(descriptor: int) -> bool:
    """Try to take the lock, which goes with the last process that has the descriptor."""
    with suppress(BlockingIOError, PermissionError):
        if sys.platform == "win32":
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
