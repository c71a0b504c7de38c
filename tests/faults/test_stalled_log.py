"""Nobody reads the log: lines are dropped and counted, and the service answers and ends."""

import fcntl
import os
import signal
import sys
from pathlib import Path

import httpx2
import pytest

from tests.support.server import free_port, start_process
from tests.support.waiting import wait_until


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone sets the size of a pipe")
def test_a_log_reader_that_stalls_stops_nothing_else(tiny_m3: Path, tmp_path: Path) -> None:
    """Sent 40: 40 answered, with more lines than the pipe holds."""
    port, (reads, writes) = str(free_port()), os.pipe()
    fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, 4096)
    with os.fdopen(writes, "w") as log:
        process = start_process(tmp_path, output=log, EMBEDDING_MODEL=str(tiny_m3), PORT=port)
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:

            def is_healthy() -> bool:
                assert process.poll() is None
                try:
                    return client.get("/health").status_code == 200
                except httpx2.ConnectError:
                    return False

            wait_until(is_healthy, "not healthy in time")
            statuses = [client.post("/embeddings/", json={}).status_code for _ in range(40)]
            assert statuses == [422] * 40
            assert client.get("/health/live").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait(60)
        os.close(reads)
