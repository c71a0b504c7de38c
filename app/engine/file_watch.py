"""Watches the mapped files of weights: a change to one would give wrong vectors."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

import structlog

log = structlog.get_logger(__name__)

_SECONDS = 2.0


class WatchedFiles(Protocol):
    """Files that models read from while they serve."""

    @property
    def names(self) -> Sequence[str]:
        """Their names for messages; empty if the models hold copies of everything."""

    def changed(self) -> str | None:
        """The name of a file that was written to since it was loaded; reads from the disk."""


class FileWatch:
    """Checks every 2 seconds, off the event loop, until a file has changed."""

    def __init__(self) -> None:
        self._changed: str | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def problem(self) -> str | None:
        """Which file was changed and what to do, or None."""
        if self._changed is None:
            return None
        return (
            f"the file {self._changed} was written to while the model read from it, so its vectors "
            "are wrong: restart the service, and replace a file by renaming a new one over it"
        )

    def start(self, files: WatchedFiles) -> None:
        """Start the checks."""
        self._task = asyncio.create_task(self._run(files), name="file-watch")

    async def _run(self, files: WatchedFiles) -> None:
        while files.names and self._changed is None:
            await asyncio.sleep(_SECONDS)
            self._changed = await asyncio.to_thread(files.changed)
        if self._changed is not None:
            log.error("model_file_changed", file=self._changed)

    async def close(self) -> None:
        """Stop the checks."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
