"""A service to measure: one that runs, or one that is started here for it."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import IO

import httpx2

_LISTENING = re.compile(r"listening.*?(http://[\w.:\[\]]+)")
_START_SECONDS = 900.0
_END_SECONDS = 60.0
# A measurement comes from one address.
_UNLIMITED = {
    "PORT": "0",
    "LOG_FORMAT": "console",
    "RATE_LIMIT_REQUESTS_PER_MINUTE": "1000000",
    "RATE_LIMIT_BURST_SIZE": "1000000",
}


class ServiceError(Exception):
    """The service cannot be measured; the message is one sentence."""


@contextmanager
def started_service() -> Iterator[str]:
    """Start `python -m smart_embedder` with the settings in force; its address, once it is ready.

    Raises `ServiceError` where it does not become ready.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "smart_embedder"],
        env={**os.environ, **_UNLIMITED},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    output = _Output(process.stdout)
    try:
        yield _wait_until_ready(process, output)
    finally:
        process.terminate()
        process.wait(_END_SECONDS)
        output.close()


class _Output:
    """Reads what the process prints, so that it never waits for a reader."""

    def __init__(self, lines: IO[str] | None) -> None:
        self._lines = lines
        self._last = ""
        self._found = threading.Event()
        self.url = ""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self._lines or ():
            self._last = line.strip() or self._last
            found = _LISTENING.search(line)
            if found and not self.url:
                self.url = found[1]
                self._found.set()
        self._found.set()

    def wait_for_address(self) -> str:
        """The address that it listens on; raises `ServiceError` if it ended before."""
        self._found.wait(_START_SECONDS)
        if not self.url:
            raise ServiceError(f"the service did not start: {self._last}")
        return self.url

    def close(self) -> None:
        self._thread.join(_END_SECONDS)
        if self._lines is not None:
            self._lines.close()

    @property
    def last(self) -> str:
        return self._last


def _wait_until_ready(process: "subprocess.Popen[str]", output: _Output) -> str:
    url = output.wait_for_address()
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        try:
            if httpx2.get(f"{url}/health").status_code == HTTPStatus.OK:
                return url
        except httpx2.HTTPError:
            pass  # It may be about to end, which the loop looks at next.
        time.sleep(0.1)
    raise ServiceError(f"the service did not become ready: {output.last}")
