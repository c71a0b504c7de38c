"""A real Redis for tests: started on a free loopback port, ended by its own id."""

import os
import shutil
import signal
import socketserver
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.support.answering_http import serving
from tests.support.server import free_port

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


class OddRedis(socketserver.ThreadingTCPServer):
    """Speaks enough of Redis's protocol to be talked to, and gives every question one answer."""

    daemon_threads = True

    def __init__(self, answer: bytes) -> None:
        super().__init__(("127.0.0.1", 0), _OddHandler)
        self.answer = answer

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.server_address[1]}/0"


class _OddHandler(socketserver.StreamRequestHandler):
    """A command is `*count`, and for each word `$length` and the word itself."""

    server: OddRedis

    def handle(self) -> None:
        while head := self.rfile.readline():
            words = [self._word() for _ in range(int(head[1:]))]
            greets = words[0].upper() in {b"CLIENT", b"SELECT", b"AUTH"}
            try:
                self.wfile.write(b"+OK\r\n" if greets else self.server.answer)
            except OSError:  # It has hung up: the answer before was odd enough.
                return

    def _word(self) -> bytes:
        length = int(self.rfile.readline()[1:])
        return self.rfile.read(length + 2)[:length]


def run_odd_redis(answer: bytes) -> AbstractContextManager[OddRedis]:
    """A server whose answer to every question is these bytes."""
    return serving(OddRedis(answer))
