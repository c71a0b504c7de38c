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
_SECONDS_PER_LINE = 60
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

    async def wait_for(
        self,
        attempt: Callable[[], Awaitable[Result]],
        is_final: Callable[[SmartEmbedderError], bool] = lambda _: False,
    ) -> Result:
        """Await `attempt()` until it succeeds; raise its error if that is permanent or too long.

        Errors of the service for which `is_final` is true are raised at once.
        """
        pause, deadline = _FIRST_PAUSE, time.monotonic() + self._seconds
        while True:
            try:
                result = await attempt()
            except (QdrantBusyError, SmartEmbedderError) as error:
                if isinstance(error, SmartEmbedderError) and is_final(error):
                    raise
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
    """Shows the progress of a run: a bar on a terminal, elsewhere a line per minute."""

    def __init__(self, title: str, unit: str) -> None:
        self._chunks = 0
        is_terminal = sys.stderr.isatty()
        times = "[{elapsed}<{remaining}{postfix}]"
        seconds = 0.1 if is_terminal else _SECONDS_PER_LINE
        self._bar = tqdm(
            desc=to_line(title),
            unit=unit,
            unit_scale=True,
            dynamic_ncols=True,
            file=sys.stderr,
            delay=0 if is_terminal else _SECONDS_PER_LINE,
            mininterval=seconds,
            maxinterval=_SECONDS_PER_LINE,
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt}{unit} " + times
            if is_terminal
            else "{l_bar}" + times + "\n",
        )

    def expect(self, total: int) -> None:
        """Set the total."""
        self._bar.total = total

    def advance(self, size: int) -> None:
        """Count bytes or chunks that this or an earlier run has processed."""
        self._bar.update(size)

    def store(self, chunks: int) -> None:
        """Count chunks that were stored."""
        self._chunks += chunks
        rate = self._chunks / max(self._bar.format_dict["elapsed"], 1e-3)
        self._bar.set_postfix_str(f"{self._chunks} chunks stored, {rate:.1f} chunks/s", False)

    def note(self, sentence: str) -> None:
        """Print a line to stderr, above the bar if there is one."""
        tqdm.write(to_line(sentence), file=sys.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
