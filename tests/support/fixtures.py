"""Fixtures that several rooms share, a plugin of the tests."""

from pathlib import Path

import pytest

from tests.support.checkpoints import save_m3, save_qwen, save_reranker
from tests.support.server import run_server
from tools.demo.checkpoint import build_demo_checkpoint


@pytest.fixture(scope="session")
def tiny_m3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random checkpoint of bge-m3's architecture."""
    return save_m3(tmp_path_factory.mktemp("checkpoints") / "tiny-m3")


@pytest.fixture(scope="session")
def tiny_reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random checkpoint of bge-reranker-v2-m3's architecture."""
    return save_reranker(tmp_path_factory.mktemp("checkpoints") / "tiny-reranker")


@pytest.fixture(scope="session")
def tiny_qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random checkpoint of Qwen3's architecture, for either Qwen model."""
    return save_qwen(tmp_path_factory.mktemp("checkpoints") / "tiny-qwen")


@pytest.fixture(scope="session")
def demo_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's checkpoint, built from its package."""
    return build_demo_checkpoint(tmp_path_factory.mktemp("demo") / "checkpoint")


@pytest.fixture(scope="session")
def server(tiny_m3: Path, tmp_path_factory: pytest.TempPathFactory):
    """One real server process on loopback that serves `tiny_m3` in float32, up to 2,048 tokens."""
    folder = tmp_path_factory.mktemp("server")
    settings = {"EMBEDDING_MODEL": str(tiny_m3), "BGE_EMBED_MAX_LENGTH": "2048"}
    with run_server(folder, **settings) as running:
        running.wait_until_healthy()
        yield running
