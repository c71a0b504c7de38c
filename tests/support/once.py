"""Files that one of pytest's processes makes for all of them."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def make_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return the folder `name`; the first process of this run that asks fills it with `make`.

    Other processes wait meanwhile. None may change the folder afterwards.
    """
    folder = factory.getbasetemp().resolve()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with (folder / f"{name}.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Not `tell`, which returns the end of the file when it was opened.
        if not os.fstat(lock.fileno()).st_size:
            (folder / name).mkdir()
            make(folder / name)
            lock.write("made")
    return folder / name
