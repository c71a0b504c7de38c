"""Batches, retries during outages, and the progress bar of a run."""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, Self, TypeVar

from tqdm import tqdm

from smart_embedder_client.arguments import to_line
from smart_embedder_client.errors import (
    CLIENT_TIMEOUT,
    CONNECTION_LOST,
    UNREACHABLE,
    SmartEmbedderError,
)
from smart_embedder_client.qdrant.store import QdrantBusyError

Item = TypeVar("Item")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 10.0
_LOST = {UNREACHABLE, CONNECTION_LOST, CLIENT_TIMEOUT}
_BUSY = {408, 429, 502, 503, 504}
_TOO_LARGE = "out_of_memory"
_SECONDS_PER_NOTE = 60
Result = TypeVar("Result")


def batches(
    items: Iterable[Item],
    weight: Callable[[Item], int],
    max_weight: Callable[[], int],
    max_items: int | None = None,
) -> Iterator[list[Item]]:
    """Group items into batches of at most `max_weight()`, which is called for each item.

    An item that weighs more is a batch by itself.
    """
    batch: list[Item] = []
    total = 0
    for item in items:
        total += weight(item)
        if batch and (total > max_weight() or len(batch) == max_items):
            yield batch
            batch, total = [], weight(item)
        batch.append(item)
    if batch:
        yield batch


class Patience:
    """Repeats requests during an outage of the service or of Qdrant.

    Repeating is safe: texts are embedded again, and points are stored under the same ids. An
    outage may last `seconds`, and `note` is called once with a sentence about it.
    """

    def __init__(self, seconds: float, note: Callable[[str], None]) -> None:
        self._seconds = seconds
        self._note = note
        self._is_noted = False

    async def wait_for(self, attempt: Callable[[], Awaitable[Result]]) -> Result:
        """Await `attempt()` until it succeeds; raise its error if that is permanent or too long."""
        pause, deadline = _FIRST_PAUSE, time.monotonic() + self._seconds
        while True:
            try:
                result = await attempt()
            except (QdrantBusyError, SmartEmbedderError) as error:
                wait = max(pause, error.retry_after or 0.0)
                if not is_temporary(error) or time.monotonic() + wait > deadline:
                    raise
                if not self._is_noted:
                    self._note(f"{error}; trying again for {self._seconds:g} seconds")
                self._is_noted = True
                await asyncio.sleep(wait)
                pause = min(2 * pause, _LONGEST_PAUSE)
            else:
                self._is_noted = False
                return result

    async def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function in a thread until it succeeds."""
        return await self.wait_for(lambda: asyncio.to_thread(function, *arguments))


def is_temporary(error: QdrantBusyError | SmartEmbedderError) -> bool:
    """Whether the same request may succeed later."""
    if isinstance(error, QdrantBusyError):
        return True
    return error.code in _LOST or (error.status in _BUSY and error.code != _TOO_LARGE)


class Progress:
    """Shows the progress of a run: a bar on a terminal, elsewhere a line per minute.

    `clock` returns seconds. The remaining time is estimated from the pace of this run, without the
    work that an earlier run has done.
    """

    def __init__(self, title: str, unit: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._noted = clock()
        self._total = self._read = self._skipped = self._chunks = 0
        # disable=None: no bar unless stderr is a terminal.
        self._bar = tqdm(
            desc=to_line(title),
            unit=unit,
            unit_scale=True,
            disable=None,
            dynamic_ncols=True,
            file=sys.stderr,
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt}{unit} [{elapsed}{postfix}]",
        )

    def expect(self, total: int) -> None:
        """Set the total."""
        self._bar.total = self._total = total

    def read(self, size: int) -> None:
        """Count bytes or chunks that this run has processed."""
        self._read += size
        self._update(size)

    def skip(self, size: int) -> None:
        """Count bytes or chunks that an earlier run has processed."""
        self._skipped += size
        if not self._read:
            self._began = self._clock()
        self._update(size)

    def store(self, chunks: int) -> None:
        """Count chunks that were stored."""
        self._chunks += chunks
        self._update(0)

    def _update(self, size: int) -> None:
        self._bar.set_postfix_str(self._describe_pace(), refresh=False)
        self._bar.update(size)
        if self._bar.disable and self._clock() - self._noted >= _SECONDS_PER_NOTE:
            self._noted = self._clock()
            share = (self._read + self._skipped) / max(self._total, 1)
            self.note(f"{share:.0%} read, {self._describe_pace()}")

    def _describe_pace(self) -> str:
        seconds = max(self._clock() - self._began, 1e-3)
        pace = f"{self._chunks} chunks stored, {self._chunks / seconds:.1f} chunks/s"
        if not self._read:
            return pace
        left = max(self._total - self._read - self._skipped, 0) * seconds / self._read
        return f"{pace}, {tqdm.format_interval(left)} left"

    def note_on_terminal(self, sentence: str) -> None:
        """Print a line above the bar, if there is one."""
        if not self._bar.disable:
            self.note(sentence)

    def note(self, sentence: str) -> None:
        """Print a line to stderr, whether there is a bar or not."""
        tqdm.write(to_line(sentence), file=sys.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
