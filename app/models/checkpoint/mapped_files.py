"""The files that weights are mapped from: whether one was changed under the running models.

A model in the format of its file reads the weights from there for good. Writing to such a file
changes the model, and truncating it kills the process at the next forward. To rename another file
over it is harmless: the mapped one lives on without a name.
"""

import ctypes
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from app.errors import StartupError

_MAPS = Path("/proc/self/maps")


@dataclass(frozen=True, slots=True)
class _FileState:
    """Identifies one state of a file; writing changes the last two."""

    device: int
    inode: int
    size: int
    modified: int

    @classmethod
    def of(cls, file: int | Path) -> "_FileState":
        """Of an open file or a path."""
        found = os.stat(file)  # noqa: PTH116 - of a descriptor, too
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


class MappedFiles:
    """Files, opened before they are mapped; `names` are what they are called in a message.

    An open file is asked for its state, not a path: what was mapped, whatever has its name by now.
    """

    def __init__(self, files: Iterable[tuple[str, Path]]) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, tuple[str, Path, _FileState]] = {}
        weakref.finalize(self, _close_all, self._open)
        for name, path in files:
            with suppress(OSError):  # Loading it raises the error.
                file = os.open(path, os.O_RDONLY)
                self._open[file] = (name, path, _FileState.of(file))

    @property
    def names(self) -> list[str]:
        """Those that are watched."""
        with self._lock:
            return [name for name, *_ in self._open.values()]

    def require_unchanged(self) -> None:
        """Raise `StartupError` where a path holds another file, or another state, by now."""
        with self._lock:
            for name, path, state in self._open.values():
                if not _is(path, state):
                    raise StartupError(f"{name} was changed while it was being loaded; start again")

    def changed(self) -> str | None:
        """The name of a file that was written to since it was opened; reads no file's content."""
        with self._lock:
            opened = self._open.items()
            return next((name for file, (name, _, state) in opened if not _is(file, state)), None)

    def forget_unmapped(self) -> None:
        """Stop watching files that are not mapped any more, where the system shows which are."""
        if not _MAPS.exists():
            return
        maps = _MAPS.read_text(encoding="utf-8", errors="replace")
        with self._lock:
            for file, (_, path, _) in list(self._open.items()):
                if os.path.realpath(path) not in maps:
                    del self._open[file]
                    os.close(file)

    def close(self) -> None:
        """Watch nothing any more."""
        with self._lock:
            _close_all(self._open)


def give_back_pages(paths: Iterable[Path]) -> None:
    """Take what was read of mapped files out of the process's memory; changes no content.

    Whoever reads there again gets it from the system's cache. What was written to the mapping, and
    so to no file, would be lost: weights are only read. Does nothing where the system does not tell
    what is mapped.
    """
    if sys.platform != "linux" or not _MAPS.exists():
        return
    names = {os.path.realpath(path) for path in paths}
    libc = ctypes.CDLL(None)
    for line in _MAPS.read_text(encoding="utf-8", errors="replace").splitlines():
        addresses, *_, name = line.split(maxsplit=5)
        if name in names:
            start, stop = (int(address, 16) for address in addresses.split("-"))
            size = ctypes.c_size_t(stop - start)
            libc.madvise(ctypes.c_void_p(start), size, mmap.MADV_DONTNEED)


def _is(file: int | Path, state: _FileState) -> bool:
    try:
        return _FileState.of(file) == state
    except OSError:
        return False


def _close_all(files: dict[int, tuple[str, Path, _FileState]]) -> None:
    while files:
        os.close(files.popitem()[0])
