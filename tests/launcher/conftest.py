"""A PATH with next to nothing on it, and a checkout that has been started once."""

import shutil
from pathlib import Path

import pytest

from tests.launcher.checkout import TOOLS, make_checkout, start


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder to be the whole PATH: what the launcher itself needs and nothing else."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name in TOOLS:
        (folder / name).symlink_to(str(shutil.which(name)))
    return folder


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The launcher in a checkout where one start has been made."""
    script = make_checkout(tmp_path_factory.mktemp("a checkout").resolve())
    result = start("LOCAL", "Cpu", script=script)
    assert result.returncode == 0, result.stderr
    assert "Making .venv" in result.stdout
    for packages in ("PyTorch", "the other packages"):
        assert f"Installing {packages} ..." in result.stdout
    return script
