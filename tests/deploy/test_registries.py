"""No file names the host of a package registry, because machines may use a mirror."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOSTS = re.compile(rb"(pypi|npmjs)[.](org|com)|python" + rb"hosted|deb[.]debian|security[.]debian")


def tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        pytest.skip("this is no checkout of git's")
    return [ROOT / name for name in done.stdout.decode().split("\0") if name]


def test_no_file_names_the_host_of_a_registry() -> None:
    files = [file for file in tracked() if file.is_file()]
    assert len(files) > 100
    found = [file.name for file in files if HOSTS.search(file.read_bytes())]
    assert not found
