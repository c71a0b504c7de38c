"""Qdrant's API over HTTP and gRPC, in front of its own engine in Python, told when to fail.

No Qdrant server can be installed from a package index. What is asked of this one is answered by
`QdrantClient` with a local engine, so that vectors, filters and queries are real; what it adds is
what that engine cannot show: a slow server, a full one, one that refuses a point, one that is away.

    python -m tests.support.qdrant.server

It prints its two ports when it accepts connections.
"""

import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import uvicorn

from tests.support.server import REPOSITORY

WAIT_LIMIT = 60.0


@dataclass
class QdrantServer:
    """A running one."""

    process: "subprocess.Popen[str]"
    port: int
    grpc_port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def fail(self, **fault: Any) -> None:
        """Let uploads meet a `Fault`; without arguments they succeed again."""
        httpx2.post(f"{self.url}/told/fault", json=fault or {"times": 0}).raise_for_status()

    def state(self, collection: str) -> dict[str, Any]:
        """What a collection was sent: `uploads` counts each id."""
        result: dict[str, Any] = httpx2.get(f"{self.url}/told/{collection}").json()["result"]
        return result

    def wait_for(self, collection: str, condition: Callable[[dict[str, Any]], bool]) -> None:
        """Wait until the state of a collection fulfils a condition."""
        deadline = time.monotonic() + WAIT_LIMIT
        pause = threading.Event()
        while not condition(state := self.state(collection)):
            assert time.monotonic() < deadline, state
            pause.wait(0.02)


@contextmanager
def run_qdrant() -> Iterator[QdrantServer]:
    """Start one; end it when the block ends."""
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
        process.wait(30)
        process.stdout.close()


def main() -> None:
    """Serve until the process is ended."""
    # Not on import: who starts this one needs neither.
    from tests.support.qdrant.engine import Engine  # noqa: PLC0415
    from tests.support.qdrant.grpc_api import start_grpc  # noqa: PLC0415
    from tests.support.qdrant.http import HTTP  # noqa: PLC0415

    warnings.filterwarnings("ignore", category=UserWarning)
    engine = Engine()
    grpc_server, grpc_port = start_grpc(engine)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sys.stdout.write(f"{listener.getsockname()[1]} {grpc_port}\n")
        sys.stdout.flush()
        config = uvicorn.Config(HTTP(engine).app(), log_level="warning")
        uvicorn.Server(config).run(sockets=[listener])
    grpc_server.stop(None)


if __name__ == "__main__":
    main()
