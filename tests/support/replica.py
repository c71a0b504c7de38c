"""A process at one port that a new one can replace, as the containers of a Deployment."""

from contextlib import ExitStack
from pathlib import Path

from tests.support.server import RunningServer, free_port, run_server

# Seconds, as in compose: the proxy asks every second whether the process is ready.
DELAY = {"SHUTDOWN_DELAY": "2"}


class Replica:
    """A port, and the process that serves there, if one was started."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.port = free_port()
        self._folder = folder
        self._settings = {"PORT": str(self.port), "EMBEDDING_MODEL": str(model)} | DELAY
        self._running = ExitStack()
        self.server: RunningServer | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.server is not None
        return self.server.process.pid

    def start(self) -> "Replica":
        """Start a process, and wait until it is healthy."""
        self.server = self._running.enter_context(run_server(self._folder, **self._settings))
        return self

    def stop(self) -> None:
        """Stop the process; it drains, and ends without an error."""
        assert self.server is not None
        assert self.server.stop() == 0
        self.end()

    def replace(self) -> None:
        """Stop the process, and wait until its successor is healthy."""
        self.stop()
        self.start()

    def end(self) -> None:
        """End the process if it still runs."""
        self._running.close()
