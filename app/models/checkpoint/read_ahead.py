"""Reads weights into the system's cache before they are needed."""

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from enum import Enum
from io import FileIO
from mmap import mmap
from pathlib import Path

from app.settings import Settings

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
# Large, because after each the thread may wait for Python's lock.
_AT_ONCE = 2**25


class Half(Enum):
    """A half of a file of weights; the first half holds the token embedding, which can wait."""

    FIRST = "first"
    SECOND = "second"


def read_ahead(settings: Settings, half: Half) -> threading.Thread:
    """Read, on a thread of its own, a half of each model's weights that lie on the disk.

    It only fills the system's cache: errors are raised when the weights are loaded. posix_fadvise,
    which only announces the reads, gained nothing.
    """
    # In the order in which they are loaded, each once.
    names = (settings.embedding_model, settings.dense_model, settings.reranker_model)
    paths = [path for name in dict.fromkeys(names) for path in _weights(name, settings)]
    thread = threading.Thread(target=_read_all, args=(paths, half), name="read-ahead", daemon=True)
    thread.start()
    return thread


def _read_all(paths: list[Path], half: Half) -> None:
    # Not a bytearray, which would be filled with zeros under Python's lock.
    with mmap(-1, _AT_ONCE) as buffer:
        for path in paths:
            with suppress(OSError), path.open("rb", buffering=0) as file:
                _read(file, half, buffer)


def _read(file: FileIO, half: Half, buffer: mmap) -> None:
    size = os.fstat(file.fileno()).st_size
    start, end = (0, size // 2) if half is Half.FIRST else (size // 2, size)
    file.seek(start)
    while file.tell() < end and file.readinto(buffer):
        pass


def _weights(name: str, settings: Settings) -> Iterator[Path]:
    """The files in the model's folder, or in its snapshots from the hub."""
    folders: Iterable[Path] = [Path(name)]
    if "/" in name and not Path(name).is_dir():
        model = f"models--{name.replace('/', '--')}"
        folders = (settings.hub_cache / model / "snapshots").glob("*")
    for folder in folders:
        for pattern in _WEIGHTS:
            yield from folder.glob(pattern)
