"""uvicorn's server, with an end that loses nothing it has accepted."""

import os
import signal
from collections.abc import Callable
from types import FrameType

import uvicorn

from app.drain import Drain

_SHARE_FOR_ANSWERS = 0.9
_SIGNAL_STATUS = 128


class DrainingServer(uvicorn.Server):
    """Serves until a signal comes, then drains.

    uvicorn closes its port at once and lets new callers run into a refused connection. Here the
    port stays open and says 503 until every accepted request is answered. After nine tenths of
    `timeout` seconds `abort` is called, so that who still waits gets an answer too; the rest is for
    sending it. A second signal ends the process where it stands.
    """

    def __init__(
        self, config: uvicorn.Config, drain: Drain, timeout: float, abort: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._drain = drain
        self._timeout = timeout
        self._abort = abort

    def handle_exit(self, sig: int, _frame: FrameType | None) -> None:
        """Begin to drain; at the second signal end the process, as its status then tells."""
        if self._drain.begun:
            name = signal.Signals(sig).name
            # Not the log: the signal may have come while it was being written.
            os.write(2, f"second signal ({name}): ended at once\n".encode())
            os._exit(_SIGNAL_STATUS + sig)
        self._drain.begin()
        self.should_exit = True

    async def main_loop(self) -> None:
        """Serve until a signal comes and everything accepted has its answer."""
        await super().main_loop()
        self._drain.begin()
        answers = self._timeout * _SHARE_FOR_ANSWERS
        if not await self._drain.wait(self._drain.seconds_left(answers)):
            self._abort()
        # uvicorn hands it to asyncio, which takes fractions.
        self.config.timeout_graceful_shutdown = self._drain.seconds_left(self._timeout)  # type: ignore[assignment]
