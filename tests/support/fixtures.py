"""Fixtures that several folders share, a plugin of the tests."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import save_m3, save_qwen, save_reranker
from tests.support.once import make_once
from tests.support.server import RunningServer, run_server
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
    return make_once(tmp_path_factory, "demo-checkpoint", build_demo_checkpoint)


@pytest.fixture(scope="session")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file exists, the devices of servers with this file as HOLD compute nothing."""
    return tmp_path_factory.mktemp("hold") / "hold"


@pytest.fixture(scope="session")
def serve(tiny_m3: Path, tmp_path_factory: pytest.TempPathFactory):
    """Start servers of `tiny_m3` with `run_server`, each in its own folder."""

    def start(module: str = "app", **options: Any) -> AbstractContextManager[RunningServer]:
        settings = {"EMBEDDING_MODEL": str(tiny_m3)} | options
        return run_server(tmp_path_factory.mktemp("server"), module, **settings)

    return start


@pytest.fixture(scope="session")
def server(serve):
    """Run one server process that serves `tiny_m3` in float32, up to 2,048 tokens."""
    with serve(BGE_EMBED_MAX_LENGTH="2048") as running:
        yield running


@pytest.fixture(scope="session")
def other_server(serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """It differs from `server` in its weights alone: not in the name, the sizes or the tokens."""
    model = save_m3(tmp_path_factory.mktemp("other") / "tiny-m3", layers=1)
    with serve(EMBEDDING_MODEL=str(model), BGE_EMBED_MAX_LENGTH="2048") as running:
        yield running
