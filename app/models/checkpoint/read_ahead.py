"""Reads weights into the system's cache before they are needed."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from mmap import mmap
from pathlib import Path

from app.settings import Settings

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
# Large, because after each the thread may wait for Python's lock.
_AT_ONCE = 2**25


def read_ahead(settings: Settings) -> threading.Thread:
    """Read, on a thread of its own, each model's weights that lie on the disk.

    It only fills the system's cache: errors are raised when the weights are loaded. posix_fadvise,
    which only announces the reads, gained nothing.
    """
    # In the order in which they are loaded, each once.
    names = (settings.embedding_model, settings.dense_model, settings.reranker_model)
    paths = [path for name in dict.fromkeys(names) for path in _weights(name, settings)]
    thread = threading.Thread(target=_read_all, args=(paths,), name="read-ahead", daemon=True)
    thread.start()
    return thread


def _read_all(paths: list[Path]) -> None:
    # Not a bytearray, which would be filled with zeros under Python's lock.
    with mmap(-1, _AT_ONCE) as buffer:
        for path in paths:
            with suppress(OSError), path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
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
