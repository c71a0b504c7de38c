"""What one of pytest's processes makes for all of them."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder `name`, given to `make` in the first process of this run that asks for it.

    The others wait meanwhile. All of them may only read it.
    """
    folder = factory.getbasetemp().resolve()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with (folder / f"{name}.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Not `tell`, which says where the file ended when it was opened.
        if not os.fstat(lock.fileno()).st_size:
            (folder / name).mkdir()
            make(folder / name)
            lock.write("made")
    return folder / name
