"""The demo checkpoint, built once."""

from pathlib import Path

import pytest

from app.demo.checkpoint import build_demo_checkpoint


@pytest.fixture(scope="session")
def demo_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_demo_checkpoint(tmp_path_factory.mktemp("demo") / "checkpoint")
