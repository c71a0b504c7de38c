"""A full disk: every line of the log fails, and the service still answers and exits.

tests/app/test_logs.py has the tests of dropped lines.
"""

import signal
from pathlib import Path

import httpx2
import pytest

from tests.faults.tally import GOOD
from tests.support.server import free_port, start_process
from tests.support.waiting import LIMIT, wait_until

FULL = Path("/dev/full")


def is_healthy(client: httpx2.Client, process) -> bool:
    """Poll the server, because its log does not say that it listens."""
    assert process.poll() is None
    try:
        return client.get("/health").status_code == 200
    except httpx2.ConnectError:
        return False


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
def test_full_disk_only_silences_the_log(tiny_m3: Path, tmp_path: Path) -> None:
    port = str(free_port())
    settings = {"EMBEDDING_MODEL": str(tiny_m3), "PORT": port}
    with FULL.open("w") as full:
        process = start_process(tmp_path, output=full, **settings)
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT) as client:
            wait_until(lambda: is_healthy(client, process), "not healthy in time")
            statuses = [client.post("/embeddings/", json=GOOD).status_code for _ in range(5)]
            refused = [client.post("/embeddings/", json={}).status_code for _ in range(5)]
            assert (statuses, refused) == ([200] * 5, [422] * 5)
            assert client.get("/health").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT) == 0
    finally:
        process.kill()
        process.wait(LIMIT)


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
def test_failed_start_on_a_full_disk_has_its_exit_status(tmp_path: Path) -> None:
    with FULL.open("w") as full:
        process = start_process(tmp_path, output=full, PORT="none")
    assert process.wait(LIMIT) == 1
