"""Fixtures that several rooms share."""

import os
from pathlib import Path

import pytest

# Before anything imports huggingface_hub: no test may reach for a model hub.
os.environ["HF_HUB_OFFLINE"] = "1"

from tests.checkpoints import save_m3
from tests.server import RunningServer, run_server


@pytest.fixture(scope="session")
def tiny_m3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random checkpoint of bge-m3's architecture."""
    return save_m3(tmp_path_factory.mktemp("checkpoints") / "tiny-m3")


@pytest.fixture(scope="session")
def server(tiny_m3: Path, tmp_path_factory: pytest.TempPathFactory):
    """One real server process on loopback that serves `tiny_m3` in float32."""
    with run_server(tmp_path_factory.mktemp("server"), EMBEDDING_MODEL=str(tiny_m3)) as running:
        running.wait_until_healthy()
        yield running


__all__ = ["RunningServer"]
