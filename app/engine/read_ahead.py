"""Bringing the weights from the disk while Python still imports what will read them."""

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from app.settings import Settings

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_AT_ONCE = 2**23


def read_ahead(settings: Settings) -> threading.Thread:
    """Read, on a thread of its own, the weights of every model that lies on the disk.

    It only fills the system's cache: what cannot be read will be told when it is loaded. Only to
    tell the system what will be needed (posix_fadvise) gained nothing.
    """
    names = {settings.embedding_model, settings.dense_model, settings.reranker_model}
    thread = threading.Thread(
        target=_read_all, args=(names, settings.hub_cache), name="read-ahead", daemon=True
    )
    thread.start()
    return thread


def _read_all(names: set[str], hub_cache: Path) -> None:
    buffer = bytearray(_AT_ONCE)
    for name in names:
        for path in _weights(name, hub_cache):
            with suppress(OSError), path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


def _weights(name: str, hub_cache: Path) -> Iterator[Path]:
    """The files in the model's folder, or in its snapshots from the hub."""
    snapshots = hub_cache / f"models--{name.replace('/', '--')}" / "snapshots"
    for folder in [Path(name)] if Path(name).is_dir() else snapshots.glob("*"):
        for pattern in _WEIGHTS:
            yield from folder.glob(pattern)
