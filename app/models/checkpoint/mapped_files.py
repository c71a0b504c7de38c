"""The files that weights are mapped from, and checks whether one was changed.

A model in the dtype of its file keeps reading the weights from there. Writing to such a file
changes the model, and truncating it kills the process at the next forward. Renaming another file
over it is harmless: the mapped file stays, without a name.
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
        """The state of an open file or of a path."""
        found = os.stat(file)  # noqa: PTH116 - of a descriptor, too
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


class MappedFiles:
    """Files, opened before they are mapped, each with its name in messages.

    The state is that of the open file, which is the mapped one even if its path names another.
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
        """The names of the watched files."""
        with self._lock:
            return [name for name, *_ in self._open.values()]

    def require_unchanged(self) -> None:
        """Raise `StartupError` if a path names another file by now, or the file has changed."""
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
        """Stop watching files that are no longer mapped, on systems that show mappings."""
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
    """Release the pages of mapped files from the process's memory.

    A later read gets them from the system's cache. Weights must only be read, because writes to the
    mapping would be lost. Does nothing on systems that do not show mappings.
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
