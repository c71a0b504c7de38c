"""`pip install .`: what is in the package, and whether it works where there is no checkout."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from smart_embedder import __version__

ROOT = Path(__file__).resolve().parents[1]
NOT_PACKAGED = shutil.ignore_patterns("__pycache__", "kernels-*")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package in a folder of its own, without what it depends on."""
    checkout, folder = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("installed")
    for name in ("app", "smart_embedder", "tools"):
        shutil.copytree(ROOT / name, checkout / name, ignore=NOT_PACKAGED)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    install(checkout, folder)
    return folder


def install(checkout: Path, folder: Path) -> None:
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", *offline, "--target", folder, checkout],
        check=True,
    )


def run(installed: Path, *command: str | Path) -> str:
    return subprocess.run(
        command,
        cwd=installed.parent,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_the_command_serves(installed: Path) -> None:
    assert "--max-queue-size" in run(installed, installed / "bin" / "smart-embedder", "--help")


def test_it_takes_no_name_that_another_project_has(installed: Path) -> None:
    packages = {path.name for path in installed.iterdir() if path.suffix != ".dist-info"}
    assert packages == {"bin", "smart_embedder"}


def test_the_engine_is_a_library(installed: Path) -> None:
    script = (
        "import smart_embedder, importlib.metadata as metadata\n"
        "from smart_embedder import Engine\n"
        "print(Engine.__name__, metadata.version('smart-embedder'), smart_embedder.__file__)"
    )
    told = run(installed, sys.executable, "-c", script)
    name, version, file = told.split()
    assert (name, file) == ("Engine", str(installed / "smart_embedder" / "__init__.py"))
    assert Version(version) == Version(__version__)


def test_the_page_is_in_it(installed: Path) -> None:
    files = {path.relative_to(ROOT) for path in (ROOT / "smart_embedder" / "ui").rglob("*.*")}
    assert files
    assert all((installed / file).is_file() for file in files)


def test_the_kernels_can_be_built_of_it(installed: Path) -> None:
    ops = Path("smart_embedder", "models", "ops")
    names = {path.name for path in (ROOT / ops / "csrc").glob("*.*") if path.suffix != ".so"}
    assert {path.name for path in (installed / ops / "csrc").iterdir()} == names
    assert (installed / ops / "requirements-kernels.txt").is_file()


def test_the_service_and_the_client_share_one_command(installed: Path, tmp_path: Path) -> None:
    """Whichever of the two packages is installed last, its command knows those of the other."""
    client, folder = tmp_path / "client", tmp_path / "installed"
    shutil.copytree(ROOT / "client", client, ignore=NOT_PACKAGED)
    install(client, folder)
    both = os.pathsep.join(map(str, (installed, folder)))
    for package in (installed, folder):
        command = [sys.executable, package / "bin" / "smart-embedder"]
        for arguments, told in (
            (["--help"], "--max-queue-size"),
            (["--help"], "smart-embedder ingest"),
            (["search", "--help"], "--rescore"),
        ):
            done = subprocess.run(
                [*command, *arguments],
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": both},
                capture_output=True,
                text=True,
                check=True,
            )
            assert told in done.stdout
