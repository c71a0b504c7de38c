"""Reads the files of models by ordinary reads.

Nothing of a file stays mapped or open: once a model is loaded, its files may be written over, cut
short or removed. While one is being read, a change of it ends the loading.
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

# Bytes that are read at once: a larger number is no faster, and these are rounded in the cache.
AT_ONCE = 2**22
# The most bytes of a file that is read as a whole. The largest are tokenizers, of some 30 MB.
_LARGEST = 2**29
# Bytes of weights after which the allocator gives back what is left of those that were laid out
# anew, which is a tenth of them.
_TRIM_AFTER = 2**28
# What is read ahead.
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
# Large, because after each the thread may wait for Python's lock.
_AHEAD_AT_ONCE = 2**25

# The states of the files that were read, within `reading`.
_states: ContextVar[dict[Path, tuple[int, ...]] | None] = ContextVar("states", default=None)


def _state(found: os.stat_result) -> tuple[int, ...]:
    """Identifies one state of a file; writing changes the last three."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _changed(path: Path) -> StartupError:
    return StartupError(f"{path} was changed while it was being read: start again")


@contextmanager
def reading() -> Iterator[None]:
    """Note what is read of models within the block; raises `StartupError` if a file was changed.

    A model may be loaded for several devices, and its configuration is read more than once.
    """
    states: dict[Path, tuple[int, ...]] = {}
    token = _states.set(states)
    try:
        yield
    finally:
        _states.reset(token)
    for path, state in states.items():
        try:
            now = _state(path.stat())
        except OSError as error:
            raise _changed(path) from error
        if now != state:
            raise _changed(path)


class ModelFile:
    """A file of a model, `opened` as long as this object exists; threads may read from it."""

    def __init__(self, path: Path) -> None:
        """Open it; raises `OSError`, and `StartupError` if it was changed since an earlier time."""
        self.path = path
        self.opened = path.open("rb", buffering=0)
        weakref.finalize(self, self.opened.close)
        found = os.fstat(self.opened.fileno())
        self.size = found.st_size
        self._lock = threading.Lock()
        self._read_since_trim = 0
        states, state = _states.get(), _state(found)
        if states is not None and states.setdefault(path, state) != state:
            raise _changed(path)

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fill the buffer from the byte `start` on; raises `StartupError` if the file ends there.

        It is longer when it is opened, or such a read is not begun.
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
                raise _changed(self.path)
            done += count
        with self._lock:
            self._read_since_trim += done
            trims = self._read_since_trim > _TRIM_AFTER
            if trims:
                self._read_since_trim = 0
        if trims:
            trim_heap()

    def read(self, start: int, length: int) -> bytes:
        """So many bytes; raises `EOFError` where the file has fewer."""
        if start + length > self.size:
            raise EOFError(f"{self.path.name} is cut short")
        content = bytearray(length)
        self.read_into(memoryview(content), start)
        return bytes(content)


def read_file(path: Path) -> bytes:
    """The content of a file; raises `OSError`, also where it is too large for what it should be."""
    file = ModelFile(path)
    if file.size > _LARGEST:
        raise OSError(f"it has {file.size:,} bytes, and at most {_LARGEST:,} are read")
    return file.read(0, file.size)


def model_folders(settings: EngineSettings) -> Iterator[Path]:
    """The folders of the models that lie on the disk, each once, in the order of their loading."""
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
    """Read, on a thread of its own, the weights in these folders.

    It only fills the system's cache: errors are raised when the weights are loaded. posix_fadvise,
    which only announces the reads, gained nothing.
    """
    paths = [path for folder in folders for each in _WEIGHTS for path in folder.glob(each)]

    def read_all() -> None:
        # Not a bytearray, which would be filled with zeros under Python's lock.
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
    """Whether a file's content at `offset` is in the system's cache; False where none can tell."""
    try:
        return os.preadv(file.fileno(), [bytearray(1)], offset, os.RWF_NOWAIT) > 0
    except (AttributeError, OSError):
        return False


def trim_heap() -> None:
    """Return memory that the allocator keeps after it was freed, if the allocator can."""
    if sys.platform == "linux":
        with suppress(AttributeError):  # glibc alone has it.
            ctypes.CDLL(None).malloc_trim(0)
