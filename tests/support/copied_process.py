"""Starts servers as copies of one process that has already imported what a start imports.

Most of a start's time goes to importing torch. The copies (of `tests.support.template`) are forked
processes with settings, folder, output and exit status of their own, and run their module as
`python -m` would. All processes of a test run share one template, which is started when the first
of them needs it.
"""

import atexit
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
# Variables that libraries read when they are imported, and that the service sets before that.
_ENVIRONMENT = {"GOMP_SPINCOUNT": "2000"}
# Python or a library reads these before the service runs: such a start needs a new interpreter.
_READ_EARLY = ("PYTHON", "LD_", "OTEL_", "FASTAPI_", "OMP_", "GOMP_", "MALLOC_", "TMPDIR")
_NUMBER_BYTES = 16
# The variable with the address of the template's socket, for all processes of a test run.
_ADDRESS = "TEMPLATE_OF_COPIES"


def can_copy(environment: Mapping[str, str]) -> bool:
    """Return whether a start with these variables may be a copy; never outside of tests."""
    in_tests = _ADDRESS in os.environ
    return in_tests and not any(name.startswith(_READ_EARLY) for name in environment)


def offer_copies() -> None:
    """Let this process and its children start copies, until this process ends."""
    folder = tempfile.mkdtemp(prefix="copies-")
    os.environ[_ADDRESS] = f"{folder}/template"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(os.environ[_ADDRESS])
    listener.listen()
    held, lifeline = os.pipe()
    started: list[subprocess.Popen[bytes]] = []

    def start_when_asked() -> None:
        ready, *_ = select.select([listener.fileno(), held], [], [])
        with listener:
            if held not in ready:
                started.append(_start_template(listener.fileno(), held))
        os.close(held)

    def end() -> None:
        os.close(lifeline)
        waiting.join()
        for process in started:
            process.communicate()
        shutil.rmtree(folder)

    waiting = threading.Thread(target=start_when_asked, daemon=True)
    waiting.start()
    atexit.register(end)


def _start_template(listener: int, lifeline: int) -> "subprocess.Popen[bytes]":
    inherited = {k: v for k, v in os.environ.items() if k in {"PATH", "HOME", "LANG", "TMPDIR"}}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.template", str(listener), str(lifeline)],
        pass_fds=[listener, lifeline],
        env=inherited | _ENVIRONMENT | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,  # A pipe, as for copies; nothing is written to it.
    )


class CopiedProcess:
    """Like `subprocess.Popen`, for a copy of the template; `stdout` is None if it is a file."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        output: Any,
    ) -> None:
        start = {"arguments": [module, *arguments], "folder": str(folder)}
        self.returncode: int | None = None
        self.stdout, writer = _output(output)
        self._status = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._status.connect(os.environ[_ADDRESS])
        message = json.dumps(start | {"environment": dict(environment)}).encode()
        socket.send_fds(self._status, [message], [writer])
        if self.stdout is not None:
            os.close(writer)
        self.pid = int(self._status.recv(_NUMBER_BYTES))
        self._waiter = threading.Thread(target=self._receive_status, daemon=True)
        self._waiter.start()

    def _receive_status(self) -> None:
        with self._status:
            self.returncode = int(self._status.recv(_NUMBER_BYTES))

    def poll(self) -> int | None:
        """Return the exit status, once the process has ended."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status; raises `subprocess.TimeoutExpired`."""
        self._waiter.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a copy of the template", timeout or 0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _output(output: Any) -> tuple[Any, int]:
    """Return the stream that tests read, if it is a pipe, and the descriptor of the copy."""
    if output != subprocess.PIPE:
        return None, output.fileno()
    reader, writer = os.pipe()
    return os.fdopen(reader, encoding="utf-8"), writer
