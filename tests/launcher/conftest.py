"""A PATH with next to nothing on it, a checkout, and one that has been started once."""

import json
import shutil
from pathlib import Path

import pytest

from tests.launcher.checkout import BASH, SHOWN, TOOLS, Checkout, make_checkout
from tests.support.once import made_once


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder to be the whole PATH: what the launcher itself needs and nothing else."""
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
    """The launcher in a checkout of its own: ours may hold the .venv of a start, or an .env."""
    make_checkout(tmp_path / "checkout")
    return Checkout(tmp_path / "checkout", tools)


@pytest.fixture(scope="session")
def started_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout where one start has been made, for copies."""
    return made_once(tmp_path_factory, "a checkout", _make_started)


def _make_started(folder: Path) -> None:
    make_checkout(folder)
    named = {"DENSE_EMBEDDING_MODEL": "own", "RERANKER_MODEL": "none", "COLUMNS": "80"}
    checkout = Checkout(folder, _tools(folder / "programs"))
    code, shown = checkout.start_on_terminal("LOCAL Cpu", **named)
    assert code == 0, shown
    (folder / SHOWN).write_text(json.dumps(shown))


@pytest.fixture
def started(started_once: Path, tools: Path, tmp_path: Path) -> Checkout:
    """A copy of it, which a test may leave in any state."""
    folder = tmp_path / "a checkout"
    return Checkout(shutil.copytree(started_once, folder, symlinks=True), tools)
