"""A server whose device fails on purpose, and one whose patience is short enough to be tried."""

from functools import partial
from pathlib import Path

import pytest


@pytest.fixture
def faulty_server(serve, tmp_path: Path):
    """A function that starts one."""
    return partial(serve, "tests.faults.faulty_server", GATE=str(tmp_path / "gate"))


@pytest.fixture
def open_gate(tmp_path: Path):
    """A function that lets held forwards go on."""
    return (tmp_path / "gate").touch


@pytest.fixture(scope="session")
def impatient(serve):
    """4 seconds for a request, and 4 in which something of its answer must be read."""
    with serve(REQUEST_TIMEOUT="4", RERANK_GPU_TIMEOUT="3") as running:
        yield running
