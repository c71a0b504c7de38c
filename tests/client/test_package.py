"""`pip install ./client`: what is in the package, and that it works where the service is not."""

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

CLIENT = Path(__file__).resolve().parents[2] / "client"
SCRIPT = """
import importlib.metadata, json, sys
import smart_embedder_client
told = importlib.metadata.metadata("smart-embedder-client")
print(json.dumps([smart_embedder_client.__file__, told["Version"], sorted(sys.modules)]))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package in a folder of its own, without what it depends on."""
    checkout, folder = tmp_path_factory.mktemp("client"), tmp_path_factory.mktemp("installed")
    shutil.copytree(
        CLIENT, checkout, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
    )
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", *offline, "--target", folder, checkout],
        check=True,
    )
    return folder


def test_it_works_without_the_service(installed: Path) -> None:
    printed = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=installed,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    file, version, modules = json.loads(printed)
    package = installed / "smart_embedder_client"
    assert file == str(package / "__init__.py")
    assert Version(version) == Version(smart_embedder_client.__version__)
    assert not {name.partition(".")[0] for name in modules} & {
        "app",
        "smart_embedder",
        "tools",
        "torch",
        "fastapi",
    }
    assert (package / "py.typed").exists()


def test_it_needs_httpx_and_numpy_alone_and_is_tested_in_the_versions_that_it_names() -> None:
    project = tomllib.loads((CLIENT / "pyproject.toml").read_text("utf-8"))["project"]
    assert [Requirement(each).name for each in project["dependencies"]] == ["httpx", "numpy"]
    for lines in (project["dependencies"], *project["optional-dependencies"].values()):
        for needed in map(Requirement, lines):
            assert needed.specifier.contains(metadata.version(needed.name)), needed
