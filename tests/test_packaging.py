"""The packages that pip builds: what is in them, and whether they work elsewhere."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
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
# What pip calls; its own installation takes longer, and adds nothing.
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def unpack(source: Path, names: tuple[str, ...], folder: Path) -> Path:
    """Build a package, without what it depends on, and return a folder with its files."""
    checkout, installed = folder / "checkout", folder / "installed"
    checkout.mkdir()
    not_packaged = shutil.ignore_patterns("__pycache__", "kernels-*")
    for name in names:
        if (source / name).is_dir():
            shutil.copytree(source / name, checkout / name, ignore=not_packaged)
        else:
            shutil.copy(source / name, checkout)
    command = [sys.executable, "-c", BUILD, folder]
    subprocess.run(command, cwd=checkout, capture_output=True, check=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(installed)
    return installed


def run(installed: Path, script: str) -> list[str]:
    """Run a script that can import the package, and return the lines that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", f"import importlib.metadata as metadata, json, sys\n{script}"],
        cwd=installed.parent,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_the_engine_is_a_library_with_all_files_and_no_name_of_another_project(
    tmp_path: Path,
) -> None:
    installed = unpack(ROOT, SERVICE, tmp_path)
    packages = {path.name for path in installed.iterdir() if path.suffix != ".dist-info"}
    assert packages == {"smart_embedder"}, "no app"
    assert not list(installed.glob("*.dist-info/entry_points.txt")), "no command"
    (line,) = run(
        installed,
        "from smart_embedder import Engine\n"
        "print(json.dumps([sys.modules['smart_embedder'].__file__, Engine.__name__,"
        " metadata.version('smart-embedder')]))",
    )
    file, name, version = json.loads(line)
    assert (name, file) == ("Engine", str(installed / "smart_embedder" / "__init__.py"))
    assert Version(version) == Version(__version__)
    # The kernels can be built of it.
    kernels = Path("smart_embedder", "kernels")
    names = {path.name for path in (ROOT / kernels / "csrc").glob("*.*") if path.suffix != ".so"}
    assert {path.name for path in (installed / kernels / "csrc").iterdir()} == names
    assert (installed / kernels / "requirements-kernels.txt").is_file()


def test_the_client_and_its_command_work_without_the_service(tmp_path: Path) -> None:
    installed = unpack(ROOT / "client", CLIENT, tmp_path)
    line, *shown = run(
        installed,
        "import smart_embedder_client as client\n"
        "found = metadata.distribution('smart-embedder-client')\n"
        "print(json.dumps([client.__file__, found.version, sorted(sys.modules)]))\n"
        "(command,) = found.entry_points\n"
        "sys.argv = [command.name, 'search', '--help']\n"
        "command.load()()",
    )
    file, version, modules = json.loads(line)
    package = installed / "smart_embedder_client"
    assert file == str(package / "__init__.py")
    assert Version(version) == Version(smart_embedder_client.__version__)
    names = {name.partition(".")[0] for name in modules}
    assert not names & {"app", "smart_embedder", "tools", "torch", "fastapi"}
    assert (package / "py.typed").exists()
    assert shown[0].startswith("usage: smart-embedder search")
    assert "--rescore" in "\n".join(shown)


def test_the_client_needs_httpx_and_numpy_alone_and_is_tested_in_versions_that_it_names() -> None:
    project = tomllib.loads((ROOT / "client/pyproject.toml").read_text("utf-8"))["project"]
    assert [Requirement(requirement).name for requirement in project["dependencies"]] == [
        "httpx",
        "numpy",
    ]
    for lines in (project["dependencies"], *project["optional-dependencies"].values()):
        for needed in map(Requirement, lines):
            assert needed.specifier.contains(metadata.version(needed.name)), needed
