"""A real Redis for tests: started on a free loopback port, ended by its own id."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.ports import free_port

PROGRAM = shutil.which("redis-server")

needs_redis = pytest.mark.skipif(
    PROGRAM is None, reason="redis-server is not installed (apt-get install redis-server)"
)


class RedisServer:
    """A Redis that keeps nothing on disk, always on the same port, and may die and come back."""

    def __init__(self, folder: Path, password: str = "") -> None:
        self._folder = folder
        self._password = password
        self.port = free_port()
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        user = f":{self._password}@" if self._password else ""
        return f"redis://{user}127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Return once it accepts connections."""
        assert PROGRAM is not None
        options = ["--bind", "127.0.0.1", "--port", str(self.port), "--save", ""]
        options += ["--dir", str(self._folder), "--requirepass", self._password]
        self._process = subprocess.Popen([PROGRAM, *options], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        said = ""
        for line in self._process.stdout:
            said += line
            if "Ready to accept connections" in line:
                return
        raise AssertionError(said)

    def kill(self) -> None:
        """End it at once, as a crash would."""
        assert self._process is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait(30)
        self._process.stdout.close()
        self._process = None

    def freeze(self) -> None:
        """Let it answer nothing, while its connections stay open."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    @property
    def running(self) -> bool:
        return self._process is not None


@contextmanager
def run_redis(folder: Path, password: str = "") -> Iterator[RedisServer]:
    """Start a Redis; end it when the block ends."""
    server = RedisServer(folder, password)
    server.start()
    try:
        yield server
    finally:
        if server.running:
            server.kill()
