"""uvicorn's server, with an end that loses nothing it has accepted."""

import asyncio
import os
import signal
from contextlib import suppress
from types import FrameType

import uvicorn

from app.server.connection import BoundedConnection
from app.server.drain import Drain
from app.server.listening import has_callers, keep_newcomers_out

_SHARE_FOR_ANSWERS = 0.9
_SIGNAL_STATUS = 128
# How long connections may last when everything is answered, and how often they are looked at.
_LINGER_SECONDS = 1.0
_LOOK_SECONDS = 0.02
# A connection that began before newcomers were kept out is complete by then.
_SETTLE_SECONDS = 0.1


class DrainingServer(uvicorn.Server):
    """Serves until a signal comes, then drains.

    uvicorn closes its port at once: new callers run into a refused connection, and those who are
    connected and not yet accepted into a reset one. Here the port stays open and says 503 until
    every accepted request is answered. After nine tenths of `timeout` seconds the drain is ended,
    so that whoever still waits gets an answer too. Then nobody new is let in, whoever has come is
    answered, and the port is closed when all have read it, or after a second. A second signal ends
    the process where it stands.
    """

    def __init__(self, config: uvicorn.Config, drain: Drain, timeout: float) -> None:
        super().__init__(config)
        self._drain = drain
        self._timeout = timeout

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
        for connection in self.server_state.connections:
            if isinstance(connection, BoundedConnection):
                connection.end_after_answer()
        answers = self._timeout * _SHARE_FOR_ANSWERS
        if not await self._drain.wait(self._drain.seconds_left(answers)):
            self._drain.end()
        await self._see_callers_off()
        # uvicorn hands it to asyncio, which takes fractions.
        self.config.timeout_graceful_shutdown = self._drain.seconds_left(self._timeout)  # type: ignore[assignment]

    async def _see_callers_off(self) -> None:
        """Let nobody in any more, and wait until whoever is here has read his answer."""
        listeners = [each for server in self.servers for each in server.sockets]
        for listener in listeners:
            keep_newcomers_out(listener)
        left = self._drain.seconds_left(self._timeout)
        await asyncio.sleep(min(_SETTLE_SECONDS, left))
        with suppress(TimeoutError):
            async with asyncio.timeout(min(_LINGER_SECONDS, left)):
                # uvicorn tells nobody when a connection ends.
                while self.server_state.connections or any(map(has_callers, listeners)):  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_SECONDS)
