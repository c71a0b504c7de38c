"""A nearly empty PATH, a checkout, and a checkout after a start."""

import json
import shutil
from pathlib import Path

import pytest

from tests.launcher.checkout import BASH, SHOWN, TOOLS, Checkout, make_checkout
from tests.support.once import make_once


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder for PATH that holds only the programs that the launcher needs."""
    return _tools(tmp_path / "tools")


def _tools(folder: Path) -> Path:
    if BASH is None:
        pytest.skip("start_server.sh needs bash")
    folder.mkdir()
    for name in TOOLS:
        (folder / name).symlink_to(str(shutil.which(name)))
    return folder


@pytest.fixture
def checkout(tmp_path: Path, tools: Path) -> Checkout:
    """A checkout for the launcher, because ours may hold a .venv or an .env."""
    make_checkout(tmp_path / "checkout")
    return Checkout(tmp_path / "checkout", tools)


@pytest.fixture(scope="session")
def started_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout after a start, to be copied."""
    return make_once(tmp_path_factory, "a checkout", _make_started)


def _make_started(folder: Path) -> None:
    make_checkout(folder)
    named = {"DENSE_EMBEDDING_MODEL": "own", "RERANKER_MODEL": "none", "COLUMNS": "80"}
    checkout = Checkout(folder, _tools(folder / "programs"))
    code, shown = checkout.start_on_terminal("LOCAL Cpu", **named)
    assert code == 0, shown
    (folder / SHOWN).write_text(json.dumps(shown))


@pytest.fixture
def started(started_once: Path, tools: Path, tmp_path: Path) -> Checkout:
    """A copy of `started_once`, which a test may change."""
    folder = tmp_path / "a checkout"
    return Checkout(shutil.copytree(started_once, folder, symlinks=True), tools)
