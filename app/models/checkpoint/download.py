"""Counts the bytes of a download, for the log and for /health, in place of progress bars."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import structlog
from huggingface_hub.utils.tqdm import tqdm

from app.engine.download import Download, DownloadStatus, human_size

log = structlog.get_logger(__name__)

# How the hub's library names its bars of bytes, as they come from the network and as they reach the
# disk. Where the hub stores files in chunks, the disk lags behind, and what the disk has in another
# file is not sent at all.
_BYTE_BARS = {"huggingface_hub.snapshot_download.transfer", "huggingface_hub.snapshot_download"}
_SECONDS_BETWEEN_LINES = 5.0
_SECONDS_TO_LEFTOVER = 3600.0


class DownloadProgress:
    """The progress of one model's files: in `status` at once, in the log every few seconds."""

    def __init__(
        self,
        model: str,
        status: DownloadStatus,
        *,
        total: int,
        on_disk: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._status = status
        self._total = total
        self._on_disk = on_disk
        self._clock = clock
        self._counted: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._show()
        self._log()

    def add(self, bar: str, count: int) -> None:
        """Count bytes for one of the bars; called by the threads that download."""
        with self._lock:
            self._counted[bar] += count
            self._show()
            if self._clock() >= self._next_line:
                self._log()

    def _show(self) -> None:
        counted = max(self._counted.values(), default=0)
        done = min(self._on_disk + counted, self._total)
        self._status.current = self._download = Download(self._model, done, self._total)

    def _log(self) -> None:
        self._next_line = self._clock() + _SECONDS_BETWEEN_LINES
        download = self._download
        log.info(
            "model_download",
            model=download.model,
            percent=download.percent,
            done=human_size(download.done),
            total=human_size(download.total),
        )


@contextmanager
def follow_download(
    model: str, status: DownloadStatus, sizes: dict[str, int], on_disk: set[str]
) -> Iterator[type[tqdm] | None]:
    """Report the download of those files that are not on the disk, while the block runs.

    `sizes` has the bytes of each of the model's files. Yields what the hub's library takes as
    `tqdm_class`; None where nothing is missing, and then nothing is reported either.
    """
    total = sum(sizes.values())
    present = sum(size for file, size in sizes.items() if file in on_disk)
    if total == present:
        yield None
        return
    started = time.monotonic()
    try:
        yield _bar_class(DownloadProgress(model, status, total=total, on_disk=present))
    finally:
        status.current = None
    seconds = round(time.monotonic() - started)
    log.info("model_downloaded", model=model, total=human_size(total), seconds=seconds)


def remove_leftovers(snapshot: Path) -> None:
    """Remove what downloads of this model left behind whose processes were ended.

    The hub's library begins each of them in a file of its own and never continues one. A download
    that goes on writes at least every few seconds, so an old file belongs to none.
    """
    for file in (snapshot.parents[1] / "blobs").glob("*.incomplete"):
        with suppress(OSError):  # Another start was faster, or the cache is read-only.
            if time.time() - file.stat().st_mtime > _SECONDS_TO_LEFTOVER:
                file.unlink()


def _bar_class(progress: DownloadProgress) -> type[tqdm]:
    """A progress bar that is never drawn, and counts bytes where it is one for bytes."""

    class CountingBar(tqdm):
        def __init__(self, *arguments: Any, name: str | None = None, **options: Any) -> None:
            self._name = name
            super().__init__(*arguments, **options | {"disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            if self._name in _BYTE_BARS:
                progress.add(self._name, int(n or 0))
            return None

    return CountingBar
