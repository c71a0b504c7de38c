"""`pip install .` and `pip install ./client`: what is in them, and whether they work elsewhere."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import smart_embedder_client
from packaging.requirements import Requirement
from packaging.version import Version

from smart_embedder import __version__

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[1]
SERVICE = ("app", "smart_embedder", "tools", "pyproject.toml", "README.md", "LICENSE")
CLIENT = ("pyproject.toml", "README.md", "src")


def install(source: Path, names: tuple[str, ...], folder: Path) -> Path:
    """The package in a folder of its own, without what it depends on."""
    checkout, installed = folder / "checkout", folder / "installed"
    checkout.mkdir()
    not_packaged = shutil.ignore_patterns("__pycache__", "kernels-*")
    for name in names:
        if (source / name).is_dir():
            shutil.copytree(source / name, checkout / name, ignore=not_packaged)
        else:
            shutil.copy(source / name, checkout)
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", *offline, "--target", installed, checkout],
        check=True,
    )
    return installed


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(ROOT, SERVICE, tmp_path_factory.mktemp("service"))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(ROOT / "client", CLIENT, tmp_path_factory.mktemp("client"))


def run(*command: str | Path, paths: list[Path]) -> str:
    return subprocess.run(
        command,
        cwd=paths[0].parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def told(script: str, path: Path) -> list:
    return json.loads(run(sys.executable, "-c", script, paths=[path]))


def test_it_takes_no_name_that_another_project_has(installed: Path) -> None:
    packages = {path.name for path in installed.iterdir() if path.suffix != ".dist-info"}
    assert packages == {"smart_embedder"}, "no app, and no command"


def test_the_engine_is_a_library(installed: Path) -> None:
    name, version, file = told(
        "import json, smart_embedder, importlib.metadata as metadata\n"
        "from smart_embedder import Engine\n"
        "version = metadata.version('smart-embedder')\n"
        "print(json.dumps([Engine.__name__, version, smart_embedder.__file__]))",
        installed,
    )
    assert (name, file) == ("Engine", str(installed / "smart_embedder" / "__init__.py"))
    assert Version(version) == Version(__version__)


def test_the_kernels_can_be_built_of_it(installed: Path) -> None:
    ops = Path("smart_embedder", "kernels")
    names = {path.name for path in (ROOT / ops / "csrc").glob("*.*") if path.suffix != ".so"}
    assert {path.name for path in (installed / ops / "csrc").iterdir()} == names
    assert (installed / ops / "requirements-kernels.txt").is_file()


def test_the_command_is_the_clients(client: Path) -> None:
    command = [sys.executable, client / "bin" / "smart-embedder"]
    assert "smart-embedder ingest" in run(*command, "--help", paths=[client])
    assert "--rescore" in run(*command, "search", "--help", paths=[client])


def test_the_client_works_without_the_service(client: Path) -> None:
    file, version, modules = told(
        "import importlib.metadata as metadata, json, sys, smart_embedder_client as client\n"
        "version = metadata.version('smart-embedder-client')\n"
        "print(json.dumps([client.__file__, version, sorted(sys.modules)]))",
        client,
    )
    package = client / "smart_embedder_client"
    assert file == str(package / "__init__.py")
    assert Version(version) == Version(smart_embedder_client.__version__)
    names = {name.partition(".")[0] for name in modules}
    assert not names & {"app", "smart_embedder", "tools", "torch", "fastapi"}
    assert (package / "py.typed").exists()


def test_the_client_needs_httpx_and_numpy_alone_and_is_tested_in_versions_that_it_names() -> None:
    project = tomllib.loads((ROOT / "client/pyproject.toml").read_text("utf-8"))["project"]
    assert [Requirement(requirement).name for requirement in project["dependencies"]] == [
        "httpx",
        "numpy",
    ]
    for lines in (project["dependencies"], *project["optional-dependencies"].values()):
        for needed in map(Requirement, lines):
            assert needed.specifier.contains(metadata.version(needed.name)), needed
