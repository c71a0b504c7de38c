"""Counts the bytes of a download, for the log and for /health."""

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

# The hub library's names of its progress bars for bytes from the network and bytes on the disk. For
# files that the hub stores in chunks the disk lags behind, and chunks on the disk are not sent.
_BYTE_BARS = {"huggingface_hub.snapshot_download.transfer", "huggingface_hub.snapshot_download"}
_SECONDS_BETWEEN_LINES = 5.0
_SECONDS_TO_LEFTOVER = 3600.0


class DownloadProgress:
    """The progress of one model's download, in `status`, and every few seconds in the log."""

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
    """Report the download of the files that are not on the disk, within the block.

    `sizes` holds the bytes of each of the model's files. Yields the `tqdm_class` for the hub's
    library, or None if no file is missing, when nothing is reported.
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
    """Remove the files of downloads of this model whose processes were ended.

    The hub's library begins each download in a new file and never continues one. A running download
    writes every few seconds, so an old file belongs to none.
    """
    for file in (snapshot.parents[1] / "blobs").glob("*.incomplete"):
        with suppress(OSError):  # Another start was faster, or the cache is read-only.
            if time.time() - file.stat().st_mtime > _SECONDS_TO_LEFTOVER:
                file.unlink()


def _bar_class(progress: DownloadProgress) -> type[tqdm]:
    """A class of progress bars that are not drawn, and of which those for bytes count them."""

    class CountingBar(tqdm):
        def __init__(self, *arguments: Any, name: str | None = None, **options: Any) -> None:
            self._name = name
            super().__init__(*arguments, **options | {"disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            if self._name in _BYTE_BARS:
                progress.add(self._name, int(n or 0))
            return None

    return CountingBar
