"""The checkout and the one demo server that the blocks of the documentation use."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.checkout import make_checkout
from tests.support.server import RunningServer, run_server


@pytest.fixture(scope="module")
def checkout(demo_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkout(tmp_path_factory.mktemp("docs") / "smart-embedder", demo_checkpoint)


@pytest.fixture(scope="module")
def demo(checkout: Path) -> Iterator[RunningServer]:
    """The server that the README's first command starts."""
    with run_server(checkout, arguments=["--demo"]) as server:
        yield server
