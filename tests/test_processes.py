"""What `--processes` does with tests that pass, fail, are skipped, or end their process."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.server import REPOSITORY

CONFTEST = """
import os, pathlib, pytest

@pytest.fixture(scope="session")
def session(tmp_path_factory):
    yield tmp_path_factory.getbasetemp()
    pathlib.Path(f"ended-{os.getpid()}").touch()

@pytest.fixture(scope="module")
def module():
    return os.getpid()
"""
ORDINARY = """
import os, pytest

def test_passes(module, session):
    print("printed by", "one that passes")
    assert session.name.startswith("process-")

def test_fails(module):
    print("printed by", "one that fails")
    assert os.getpid() != module

@pytest.mark.skip(reason="for no reason")
def test_is_skipped(): ...
"""
DEADLY = """
import os, signal

def test_passes_before(session): ...

def test_is_killed():
    os.kill(os.getpid(), signal.SIGKILL)

def test_passes_after(session): ...
"""


@pytest.fixture
def run(tmp_path: Path):
    def run(*arguments: str, **files: str) -> tuple[int, str]:
        for name, text in ({"conftest": CONFTEST} | files).items():
            (tmp_path / f"{name}.py").write_text(text)
        command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "tests.support.processes"]
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "base"), *arguments],
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.mark.parametrize("count", ["0", "3"])
def test_tests_are_reported_as_without_processes(count, run) -> None:
    ordinary = ORDINARY if count != "0" else ORDINARY.replace("process-", "base")
    files = {"test_one": ordinary, "test_two": ordinary}
    status, printed = run("--processes", count, **files)
    assert status == 1
    assert re.search(r"^2 failed, 2 passed, 2 skipped in ", printed, re.MULTILINE), printed
    assert printed.count("printed by one that fails") == 2
    assert "printed by one that passes" not in printed
    assert printed.count("assert os.getpid() != module") == 2
    assert printed.count("for no reason") == 2


def test_one_that_ends_its_process_fails_and_the_others_run(run, tmp_path: Path) -> None:
    status, printed = run("--processes", "2", test_deadly=DEADLY, test_one=ORDINARY)
    assert status == 1
    assert re.search(r"^2 failed, 3 passed, 1 skipped in ", printed, re.MULTILINE), printed
    assert "its process ended with the status -9" in printed
    # Of both files, and of the process that took the place of the one that was killed.
    assert len(list(tmp_path.glob("ended-*"))) == 2


def test_after_the_first_failure_no_file_is_begun(run) -> None:
    status, printed = run("--processes", "1", "-x", test_one=ORDINARY, test_two=ORDINARY)
    assert status == 1
    assert re.search(r"^1 failed, 1 passed in ", printed, re.MULTILINE), printed
