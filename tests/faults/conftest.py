"""A server whose patience is short enough to be tried."""

from pathlib import Path

import pytest

from tests.server import run_server


@pytest.fixture(scope="session")
def impatient(tiny_m3: Path, tmp_path_factory: pytest.TempPathFactory):
    """4 seconds for a request and 4 for taking its answer; 16 MB for all that clients hold."""
    settings = {
        "EMBEDDING_MODEL": str(tiny_m3),
        "REQUEST_TIMEOUT": "4",
        "RERANK_GPU_TIMEOUT": "3",
        "MAX_BODY_BYTES": "1000000",
    }
    with run_server(tmp_path_factory.mktemp("impatient"), **settings) as running:
        running.wait_until_healthy()
        yield running
