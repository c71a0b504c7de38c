"""Starts `tests.support.qdrant.server`, sets its faults, and reads what it was sent."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2

from tests.support.server import REPOSITORY
from tests.support.waiting import LIMIT, wait_until


@dataclass
class QdrantServer:
    """A running server."""

    process: "subprocess.Popen[str]"
    port: int
    grpc_port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def fail(self, **fault: Any) -> None:
        """Let uploads meet a `Fault`; without arguments they succeed again."""
        fault = fault or {"times": 0}
        response = httpx2.post(f"{self.url}/test/fault", json=fault, timeout=LIMIT)
        response.raise_for_status()

    def state(self, collection: str) -> dict[str, Any]:
        """Return the state of a `Collection`: `uploads` counts each id."""
        response = httpx2.get(f"{self.url}/test/{collection}", timeout=LIMIT)
        result: dict[str, Any] = response.json()["result"]
        return result

    def wait_for(self, collection: str, condition: Callable[[dict[str, Any]], bool]) -> None:
        """Wait until the state of a collection fulfils a condition."""
        wait_until(lambda: condition(self.state(collection)), lambda: str(self.state(collection)))


@contextmanager
def run_qdrant() -> Iterator[QdrantServer]:
    """Run a server until the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.qdrant.server"],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        port, grpc_port = map(int, process.stdout.readline().split())
        yield QdrantServer(process, port, grpc_port)
    finally:
        process.kill()
        process.wait(LIMIT)
        process.stdout.close()
