"""Bringing the weights from the disk while Python still imports what will read them."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

from app.settings import Settings

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def read_ahead(settings: Settings) -> threading.Thread:
    """Ask the system, on a thread of its own, for the weights of every model that lies on the disk.

    It only fills the system's cache: what cannot be read will be told when it is loaded.
    """
    names = {settings.embedding_model, settings.dense_model, settings.reranker_model}
    thread = threading.Thread(
        target=_read_all, args=(names, settings.hub_cache), name="read-ahead", daemon=True
    )
    thread.start()
    return thread


def _read_all(names: set[str], hub_cache: Path) -> None:
    if not hasattr(os, "posix_fadvise"):
        # To read and throw away would take from the import what this is to gain.
        return
    for name in names:
        for path in _weights(name, hub_cache):
            try:
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
            except OSError:
                continue


def _weights(name: str, hub_cache: Path) -> Iterator[Path]:
    """The files in the model's folder, or in its snapshots from the hub."""
    snapshots = hub_cache / f"models--{name.replace('/', '--')}" / "snapshots"
    for folder in [Path(name)] if Path(name).is_dir() else snapshots.glob("*"):
        for pattern in _WEIGHTS:
            yield from folder.glob(pattern)
