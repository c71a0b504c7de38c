"""A nearly empty PATH, a checkout, and a checkout after a failed start and a good one."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.launcher.checkout import (
    BASH,
    FAILED,
    SERVICE_LOCK,
    SHOWN,
    TOOLS,
    Checkout,
    copy_launcher,
    make_checkout,
)
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
    copy_launcher(tmp_path / "checkout")
    return Checkout(tmp_path / "checkout", tools)


@pytest.fixture(scope="session")
def started_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout after both starts, to be copied."""
    return make_once(tmp_path_factory, "a checkout", _make_started)


def _make_started(folder: Path) -> None:
    make_checkout(folder)
    checkout = Checkout(folder, _tools(folder / "programs"))
    lock = checkout.file(SERVICE_LOCK)
    before = lock.read_text()
    lock.write_text(before.replace("sha256:", "sha256:0"))
    checkout.file("target").mkdir()
    checkout.file("target/file").touch()
    checkout.file(".venv").symlink_to("target")
    failed = checkout.start("local cpu", PIP_RETRIES="0")
    checkout.file(FAILED).write_text(json.dumps([failed.stdout, failed.stderr]))
    lock.write_text(before)
    named = {"DENSE_EMBEDDING_MODEL": "own", "RERANKER_MODEL": "none", "COLUMNS": "80"}
    code, shown = checkout.start_on_terminal("LOCAL Cpu", **named)
    assert code == 0, shown
    (folder / SHOWN).write_text(json.dumps(shown))


@pytest.fixture
def started(started_once: Path, tools: Path, tmp_path: Path) -> Checkout:
    """A copy of `started_once`, which a test may change."""
    folder = tmp_path / "a checkout"
    shutil.copytree(started_once, folder, symlinks=True, copy_function=_copy)
    return Checkout(folder, tools)


def _copy(source: str, target: str) -> None:
    """Copy a file, or link one of pip's thousand, which nothing changes."""
    (os.link if "/site-packages/pip/" in source else shutil.copy2)(source, target)
