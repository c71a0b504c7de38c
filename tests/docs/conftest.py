"""The checkout and the one demo server that the blocks of the documentation use."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.local import DEMO_FOLDER
from tests.docs.checkout import make_checkout, start_demo
from tests.support.server import RunningServer
from tests.support.waiting import LIMIT


@pytest.fixture(scope="module")
def checkout(demo_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with the demo's model, which the launcher keeps."""
    folder = make_checkout(tmp_path_factory.mktemp("docs") / "smart-embedder")
    shutil.copytree(demo_checkpoint, folder / DEMO_FOLDER, copy_function=os.link)
    return folder


@pytest.fixture(scope="module")
def demo(checkout: Path) -> Iterator[RunningServer]:
    """The server that the README's first command starts."""
    limits = {"RATE_LIMIT_REQUESTS_PER_MINUTE": "1000000", "RATE_LIMIT_BURST_SIZE": "1000000"}
    process = start_demo(checkout, **limits)
    server = RunningServer(process)
    try:
        server.wait_until_healthy()
        yield server
        assert server.stop() == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(LIMIT)
        server.close()
