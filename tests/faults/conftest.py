"""A server whose device fails on purpose, and one whose patience is short enough to be tried."""

from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.server import run_server


@pytest.fixture
def faulty_server(tiny_m3: Path, tmp_path: Path):
    """A function that starts one; the file `tmp_path / "gate"` lets held forwards go."""

    @contextmanager
    def start(**environment: str):
        with run_server(
            tmp_path,
            "tests.faults.faulty_server",
            EMBEDDING_MODEL=str(tiny_m3),
            GATE=str(tmp_path / "gate"),
            **environment,
        ) as running:
            running.wait_until_healthy()
            yield running

    return start


@pytest.fixture
def open_gate(tmp_path: Path):
    """A function that lets held forwards go on."""
    return (tmp_path / "gate").touch


@pytest.fixture(scope="session")
def impatient(tiny_m3: Path, tmp_path_factory: pytest.TempPathFactory):
    """4 seconds for a request and 4 for its answer; 16 MB for all bodies, 24 for all answers."""
    settings = {
        "EMBEDDING_MODEL": str(tiny_m3),
        "REQUEST_TIMEOUT": "4",
        "RERANK_GPU_TIMEOUT": "3",
        "MAX_BODY_BYTES": "1000000",
        "MAX_ANSWER_BYTES": "6000000",
    }
    with run_server(tmp_path_factory.mktemp("impatient"), **settings) as running:
        running.wait_until_healthy()
        yield running
