"""How a run keeps going: batches of some seconds, patience, and the progress bar."""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, Self, TypeVar

from tqdm import tqdm

from smart_embedder_client.arguments import plain
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
    most: Callable[[], int],
    most_items: int | None = None,
) -> Iterator[list[Item]]:
    """Batches of at most `most()` together, asked again for each item; a heavier one is alone."""
    batch: list[Item] = []
    total = 0
    for item in items:
        heavier = total + weight(item)
        if batch and (heavier > most() or len(batch) == most_items):
            yield batch
            batch, heavier = [], weight(item)
        batch.append(item)
        total = heavier
    if batch:
        yield batch


class Patience:
    """Asks again until it works, or until too much time has gone by without success.

    What is asked for is the same the second time: texts are embedded again, and points are stored
    under the same ids. An outage, of which `note` is told once, may last so many seconds.
    """

    def __init__(self, seconds: float, note: Callable[[str], None]) -> None:
        self._seconds = seconds
        self._note = note
        self._noted = False

    async def wait_for(self, attempt: Callable[[], Awaitable[Result]]) -> Result:
        """What `attempt` returns at last; raises its error if it is lasting or lasts too long."""
        pause, deadline = _FIRST_PAUSE, time.monotonic() + self._seconds
        while True:
            try:
                result = await attempt()
            except (QdrantBusyError, SmartEmbedderError) as error:
                wait = max(pause, error.retry_after or 0.0)
                if not is_temporary(error) or time.monotonic() + wait > deadline:
                    raise
                if not self._noted:
                    self._note(f"{error}; trying again for {self._seconds:g} seconds")
                self._noted = True
                await asyncio.sleep(wait)
                pause = min(2 * pause, _LONGEST_PAUSE)
            else:
                self._noted = False
                return result

    async def ask(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """What `function` returns at last, called in a thread."""
        return await self.wait_for(lambda: asyncio.to_thread(function, *arguments))


def is_temporary(error: QdrantBusyError | SmartEmbedderError) -> bool:
    """Whether the same request may succeed later."""
    if isinstance(error, QdrantBusyError):
        return True
    return error.code in _LOST or (error.status in _BUSY and error.code != _TOO_LARGE)


class Progress:
    """Shows how far a run is: a bar on a terminal, elsewhere a line a minute.

    `clock` gives seconds. The time that is left follows from the pace since there was something to
    do; what an earlier run has done does not count.
    """

    def __init__(self, title: str, unit: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._noted = clock()
        self._total = self._read = self._skipped = self._chunks = 0
        # disable=None is tqdm's way to say: no bar where stderr is no terminal.
        self._bar = tqdm(
            desc=plain(title),
            unit=unit,
            unit_scale=True,
            disable=None,
            dynamic_ncols=True,
            file=sys.stderr,
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt}{unit} [{elapsed}{postfix}]",
        )

    def expect(self, total: int) -> None:
        """Set the number at which it ends."""
        self._bar.total = self._total = total

    def read(self, size: int) -> None:
        """Count bytes or chunks that are done."""
        self._read += size
        self._update(size)

    def skip(self, size: int) -> None:
        """Count bytes or chunks that an earlier run has done."""
        self._skipped += size
        if not self._read:
            self._began = self._clock()
        self._update(size)

    def store(self, chunks: int) -> None:
        """Count chunks that are stored."""
        self._chunks += chunks
        self._update(0)

    def _update(self, size: int) -> None:
        self._bar.set_postfix_str(self._pace(), refresh=False)
        self._bar.update(size)
        if self._bar.disable and self._clock() - self._noted >= _SECONDS_PER_NOTE:
            self._noted = self._clock()
            done = (self._read + self._skipped) / max(self._total, 1)
            self.note(f"{done:.0%} read, {self._pace()}")

    def _pace(self) -> str:
        seconds = max(self._clock() - self._began, 1e-3)
        pace = f"{self._chunks} chunks stored, {self._chunks / seconds:.1f} chunks/s"
        if not self._read:
            return pace
        left = max(self._total - self._read - self._skipped, 0) * seconds / self._read
        return f"{pace}, {tqdm.format_interval(left)} left"

    def tell(self, sentence: str) -> None:
        """Print a line above the bar, where there is one."""
        if not self._bar.disable:
            self.note(sentence)

    def note(self, sentence: str) -> None:
        """Print a line, also where there is no bar."""
        tqdm.write(plain(sentence), file=sys.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
