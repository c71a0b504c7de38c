"""Waiting for a service or a Qdrant that is away, busy or restarted."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from smart_embedder_client.errors import (
    CLIENT_TIMEOUT,
    CONNECTION_LOST,
    UNREACHABLE,
    SmartEmbedderError,
)
from smart_embedder_client.qdrant.errors import QdrantBusyError

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 10.0
_LOST = {UNREACHABLE, CONNECTION_LOST, CLIENT_TIMEOUT}
_BUSY = {408, 429, 502, 503, 504}
_TOO_LARGE = "out_of_memory"

Result = TypeVar("Result")


class Patience:
    """Asks again until it works, or until too much time has gone by without success.

    What is asked for is the same the second time: texts are embedded again, and points are stored
    under the same ids.

    Args:
        seconds: How long an outage may last.
        note: Told once for each outage.
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
                self._tell(error)
                await asyncio.sleep(wait)
                pause = min(2 * pause, _LONGEST_PAUSE)
            else:
                self._noted = False
                return result

    async def ask(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """What `function` returns at last, called in a thread."""
        return await self.wait_for(lambda: asyncio.to_thread(function, *arguments))

    def _tell(self, error: Exception) -> None:
        if not self._noted:
            self._note(f"{error}; trying again for {self._seconds:g} seconds")
        self._noted = True


def is_temporary(error: QdrantBusyError | SmartEmbedderError) -> bool:
    """Whether the same request may succeed later."""
    if isinstance(error, QdrantBusyError):
        return True
    return error.code in _LOST or (error.status in _BUSY and error.code != _TOO_LARGE)
