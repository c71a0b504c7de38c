"""Reads the files of models, without mapping them into memory.

Once a model is loaded, its files may be overwritten, truncated or removed. A file that changes
while the model is being loaded ends the loading.
"""

import ctypes
import io
import os
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from mmap import mmap
from pathlib import Path

from smart_embedder.errors import StartupError
from smart_embedder.settings import EngineSettings

# Bytes per read. Larger reads are no faster, and these stay in the processor's cache for rounding.
AT_ONCE = 2**22
# The most bytes of a file that is read as a whole. The largest are tokenizers, of some 30 MB.
_LARGEST = 2**29
# Bytes of weights after which the heap is trimmed: laying them out anew leaves a tenth unused.
_TRIM_AFTER = 2**28
_WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
# Bytes per read ahead: many, because after each read the thread may wait for the GIL.
_AHEAD_AT_ONCE = 2**25

# The states of the files that were read, within `refuse_changed_files`.
_states: ContextVar[dict[Path, tuple[int, ...]] | None] = ContextVar("states", default=None)


def _state_of(stat: os.stat_result) -> tuple[int, ...]:
    """Identify the state of a file; writing to it changes the last three numbers."""
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _changed_error(path: Path) -> StartupError:
    return StartupError(f"{path} was changed while it was being read: start again")


@contextmanager
def refuse_changed_files() -> Iterator[None]:
    """Raise `StartupError` if a file of a model that is read within the block changes meanwhile.

    Files are read more than once: a model may be loaded for several devices.
    """
    states: dict[Path, tuple[int, ...]] = {}
    token = _states.set(states)
    try:
        yield
    finally:
        _states.reset(token)
    for path, state in states.items():
        with suppress(OSError):
            if _state_of(path.stat()) == state:
                continue
        raise _changed_error(path)


class ModelFile:
    """A file of a model, open as long as this object exists; threads may read it concurrently."""

    def __init__(self, path: Path) -> None:
        """Open the file; raises `OSError`, and `StartupError` if it changed since it was read."""
        self.path = path
        self.opened = path.open("rb", buffering=0)
        weakref.finalize(self, self.opened.close)
        stat = os.fstat(self.opened.fileno())
        self.size = stat.st_size
        self._lock = threading.Lock()
        self._read_since_trim = 0
        states, state = _states.get(), _state_of(stat)
        if states is not None and states.setdefault(path, state) != state:
            raise _changed_error(path)

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fill the buffer from the byte `start` on.

        Raises `StartupError` if the file is shorter than when it was opened.
        """
        done = 0
        while done < len(buffer):
            part = buffer[done : done + AT_ONCE]
            if sys.platform != "win32":
                count = os.preadv(self.opened.fileno(), [part], start + done)
            else:
                with self._lock:  # Threads share the file's position.
                    self.opened.seek(start + done)
                    count = self.opened.readinto(part) or 0
            if not count:
                raise _changed_error(self.path)
            done += count
        with self._lock:
            self._read_since_trim += done
            if self._read_since_trim > _TRIM_AFTER:
                self._read_since_trim = 0
                trim_heap()

    def read(self, start: int, length: int) -> bytes:
        """Read `length` bytes; raises `EOFError` if the file has fewer."""
        if start + length > self.size:
            raise EOFError(f"{self.path.name} is cut short")
        content = bytearray(length)
        self.read_into(memoryview(content), start)
        return bytes(content)


def read_file(path: Path) -> bytes:
    """Read a whole file; raises `OSError`, also if it is too large."""
    file = ModelFile(path)
    if file.size > _LARGEST:
        raise OSError(f"it has {file.size:,} bytes, and at most {_LARGEST:,} are read")
    return file.read(0, file.size)


def model_folders(settings: EngineSettings) -> Iterator[Path]:
    """Yield the folders of the default models that are on disk, in the order of loading."""
    for name in dict.fromkeys(
        (settings.embedding_model, settings.dense_model, settings.reranker_model)
    ):
        folder = Path(name)
        if "/" in name and not folder.is_dir():
            yield from (settings.hub_cache / f"models--{name.replace('/', '--')}").glob(
                "snapshots/*"
            )
        else:
            yield folder


def read_ahead(folders: Iterable[Path]) -> threading.Thread:
    """Read the weights in these folders into the system's cache, on another thread.

    Errors are ignored here, and raised when the weights are loaded. posix_fadvise, which only
    announces reads, was no faster.
    """
    paths = [
        path for folder in folders for pattern in _WEIGHT_FILES for path in folder.glob(pattern)
    ]

    def read_all() -> None:
        # Not a bytearray, which would be filled with zeros while the GIL is held.
        with mmap(-1, _AHEAD_AT_ONCE) as buffer:
            for path in paths:
                with suppress(OSError), path.open("rb", buffering=0) as file:
                    for offset in range(0, path.stat().st_size, len(buffer)):
                        if not _is_cached(file, offset):
                            file.seek(offset)
                            file.readinto(buffer)

    thread = threading.Thread(target=read_all, name="read-ahead", daemon=True)
    thread.start()
    return thread


def _is_cached(file: io.FileIO, offset: int) -> bool:
    """Return whether the content at `offset` is in the system's cache; False if unknown."""
    try:
        return os.preadv(file.fileno(), [bytearray(1)], offset, os.RWF_NOWAIT) > 0
    except (AttributeError, OSError):
        return False


def trim_heap() -> None:
    """Return freed memory that the allocator keeps to the system, if the allocator can."""
    if sys.platform == "linux":
        with suppress(AttributeError):  # Only glibc has it.
            ctypes.CDLL(None).malloc_trim(0)
