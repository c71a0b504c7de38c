"""Runs a real server process on a free loopback port."""

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from tests.support.copied_process import CopiedProcess, can_copy
from tests.support.waiting import LIMIT, wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
# Limits of the service that a loaded machine may exceed; only tests of a limit lower it.
_UNHURRIED = {"REQUEST_TIMEOUT": f"{LIMIT:g}", "SHUTDOWN_TIMEOUT": f"{LIMIT:g}"}
_UNHURRIED |= {"GPU_PROCESS_TIMEOUT": f"{LIMIT:g}", "RERANK_GPU_TIMEOUT": f"{LIMIT - 1:g}"}
# The log line of the service, or that of uvicorn as the command.
_LISTENING = re.compile(r"listening|Uvicorn running on")


def free_port() -> int:
    """Return a loopback port that is free at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class RunningServer:
    """A server process, its address, and its log so far."""

    def __init__(self, process: "subprocess.Popen[str] | CopiedProcess") -> None:
        self.process = process
        self.lines: list[str] = []
        self._bound = threading.Event()
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            found = re.search(r"http://[^\s\"]+", line) if _LISTENING.search(line) else None
            if found:
                self.url = found[0]
                self._bound.set()
        self._bound.set()

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def wait_until_bound(self) -> None:
        assert self._bound.wait(LIMIT), self.log
        assert self.url, self.log

    def wait_until_healthy(self) -> None:
        """Poll /health until it returns 200."""
        self.wait_until_bound()
        self.wait_for_status("/health", 200)

    def get(self, path: str) -> httpx2.Response:
        """Send a request on a new connection."""
        with self.client() as client:
            return client.get(path)

    def client(self, **options: Any) -> httpx2.Client:
        # Reading the certificates that a client checks would take 30 ms of the processor.
        return httpx2.Client(base_url=self.url, timeout=LIMIT, verify=False, **options)

    def async_client(self, connections: int = 100) -> httpx2.AsyncClient:
        """Make a client that waits forever for a connection."""
        limits = httpx2.Limits(max_connections=connections)
        timeout = httpx2.Timeout(LIMIT, pool=None)
        return httpx2.AsyncClient(base_url=self.url, timeout=timeout, limits=limits, verify=False)

    def metric(self, series: str) -> float:
        """Return the current value of a series, such as `name` or `name{label="value"}`."""
        text = self.get("/metrics").text
        (value,) = re.findall(rf"^{re.escape(series)} (\S+)$", text, re.MULTILINE)
        return float(value)

    def wait_for_metric(self, series: str, value: float) -> None:
        """Poll /metrics until a series has that value."""
        self._wait(lambda: self.metric(series) == value, f"{series} never was {value}")

    def wait_for_more(self, count: Callable[[], float], than: float) -> None:
        """Wait until `count` returns more."""
        self._wait(lambda: count() > than, f"it never was more than {than}")

    def wait_for_line(self, text: str) -> None:
        """Wait until the log holds `text`."""
        self._wait(lambda: text in self.log, f"{text} was never logged")

    def wait_for_status(self, path: str, status: int) -> None:
        """Poll `path` until it returns that status."""
        self._wait(lambda: self.get(path).status_code == status, f"{path} never returned {status}")

    def _wait(self, condition: Callable[[], bool], otherwise: str) -> None:
        def holds() -> bool:
            assert self.process.poll() is None, self.log
            return condition()

        wait_until(holds, lambda: f"{otherwise}\n{self.log}")

    def close(self) -> None:
        """Read what is left of the output and close the pipe."""
        self._reader.join(LIMIT)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def stop(self) -> int:
        """Send SIGTERM, and return the exit status."""
        self.process.terminate()
        status = self.process.wait(LIMIT)
        self._reader.join(LIMIT)
        return status


def start_process(
    folder: Path,
    module: str = "app",
    prefix: Sequence[str] = (),
    *,
    output: Any = subprocess.PIPE,
    arguments: Sequence[str] = (),
    fresh: object = False,
    **environment: str,
) -> "subprocess.Popen[str] | CopiedProcess":
    """Start `python -m app` in a folder, with only the given settings.

    `fresh` starts a new interpreter even if a copy of the template would do.
    """
    inherited = {k: v for k, v in os.environ.items() if k in {"PATH", "HOME", "LANG", "TMPDIR"}}
    # Without a locale, a new interpreter would set LC_CTYPE, and a copy would not.
    settings = {"PORT": "0", "DEVICE": "cpu", "DTYPE": "float32", "HF_HUB_OFFLINE": "1"}
    settings |= {"LC_CTYPE": "C.UTF-8"}
    settings["RERANKER_MODEL"] = "late-interaction"
    # All requests of a test come from one address.
    settings |= {"RATE_LIMIT_REQUESTS_PER_MINUTE": "1000000", "RATE_LIMIT_BURST_SIZE": "1000000"}
    variables = inherited | _UNHURRIED | settings | {"PYTHONPATH": str(REPOSITORY)} | environment
    if not fresh and not prefix and can_copy(environment):
        return CopiedProcess(module, arguments, folder, variables, output)
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", module, *arguments],
        cwd=folder,
        env=variables,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
    )


@contextmanager
def run_server(
    folder: Path,
    module: str = "app",
    prefix: Sequence[str] = (),
    *,
    arguments: Sequence[str] = (),
    fresh: object = False,
    healthy: object = True,
    **environment: str,
) -> Iterator[RunningServer]:
    """Run a server until the block ends; waits until it is `healthy`, or only until it listens."""
    process = start_process(folder, module, prefix, arguments=arguments, fresh=fresh, **environment)
    running = RunningServer(process)
    try:
        running.wait_until_bound()
        if healthy:
            running.wait_until_healthy()
        yield running
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(LIMIT)
        running.close()
