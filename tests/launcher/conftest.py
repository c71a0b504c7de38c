"""A PATH with next to nothing on it, and a checkout that has been started once."""

import json
import shutil
from pathlib import Path

import pytest

from tests.launcher.checkout import (
    ROOT,
    SCRIPT,
    SHOWN,
    TOOLS,
    make_checkout,
    start_on_terminal,
)
from tests.support.once import made_once


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder to be the whole PATH: what the launcher itself needs and nothing else."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name in TOOLS:
        (folder / name).symlink_to(str(shutil.which(name)))
    return folder


@pytest.fixture(scope="session")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The launcher in a checkout of its own: ours may hold the .venv of a start, or an .env."""
    script = make_checkout(tmp_path_factory.mktemp("checkouts").resolve() / "checkout")
    for file in ROOT.glob("docker-compose.*.yml"):
        shutil.copy(file, script.parent)
    return script


@pytest.fixture(scope="session")
def started_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout where one start has been made, for copies."""
    return made_once(tmp_path_factory, "a checkout", _make_started)


def _make_started(folder: Path) -> None:
    named = {"DENSE_EMBEDDING_MODEL": "own", "RERANKER_MODEL": "none", "COLUMNS": "80"}
    script = make_checkout(folder)
    code, shown = start_on_terminal("", "LOCAL", "Cpu", script=script, **named)
    assert code == 0, shown
    (folder / SHOWN).write_text(json.dumps(shown))


@pytest.fixture(scope="module")
def started(started_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The launcher in a checkout where one start has been made: a module's own copy."""
    return _copy(started_once, tmp_path_factory.mktemp("copies").resolve())


@pytest.fixture
def own_started(started_once: Path, tmp_path: Path) -> Path:
    """The same for one test, which may leave it in any state."""
    return _copy(started_once, tmp_path)


def _copy(checkout: Path, folder: Path) -> Path:
    return shutil.copytree(checkout, folder / "a checkout", symlinks=True) / SCRIPT.name
