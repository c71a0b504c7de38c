"""The virtual environment: how it is made, repaired and updated."""

import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.launcher.checkout import LIBRARY, WHEELS, Checkout, read_app_output, write_wheel
from tests.support.disks import give_up_rights, read_only

SERVICE_LOCK = "requirements/service.lock"
HIDE = """
import importlib.machinery, sys
class Path(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name == 'venv' else super().find_spec(name, path, target)
sys.meta_path = [Path if finder.__name__ == "PathFinder" else finder
                 for finder in sys.meta_path if hasattr(finder, "__name__")]
"""

# When pip writes the first file of a package.
KILL = """
import os, signal, sys
def kill(event, arguments):
    if event == "open" and str(arguments[0]).endswith("site-packages/tiny.py"):
        if arguments[2] & (os.O_WRONLY | os.O_RDWR):
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(kill)
"""


def forget_kernels(checkout: Checkout) -> None:
    """Remove the kernels, so that the next start builds them."""
    checkout.file(LIBRARY).unlink()


def test_a_start_installs_only_what_changed(started: Checkout, tmp_path: Path) -> None:
    # The Python of the environment is enough.
    again = started.start("local cpu", PYTHON="")
    assert "Installing" not in again.stdout
    started.file(SERVICE_LOCK).write_text(write_wheel(started.file(WHEELS), "2.0"))
    changed = started.start("local cpu")
    assert "Installing" in changed.stdout
    assert "Making" not in changed.stdout
    assert read_app_output(changed)["tiny"] == "2.0"


def test_missing_kernels_are_built_and_a_failed_build_only_costs_speed(
    started: Checkout,
) -> None:
    forget_kernels(started)
    failed = started.start("local cpu", BUILD_FAILS="1")
    slower = "Requests will be slower: the kernels could not be built (no compiler); "
    assert slower in failed.stdout
    assert read_app_output(failed)
    for builds in (True, False):
        result = started.start("local cpu")
        assert ("Building the kernels" in result.stdout) == builds
        assert read_app_output(result)


def test_a_second_start_waits_until_the_first_has_installed(
    started: Checkout, tmp_path: Path
) -> None:
    started.file(SERVICE_LOCK).write_text(write_wheel(started.file(WHEELS), "2.0"))
    forget_kernels(started)
    os.mkfifo(tmp_path / "go on")
    waits = {"BUILD_WAITS_FOR": str(tmp_path / "go on")}
    first = started.begin("local cpu", **waits)
    assert first.stdout
    shown = "".join(iter(first.stdout.readline, "Building the kernels ...\n"))
    assert "Installing" in shown
    second = started.begin("local cpu")
    assert second.stdout
    told_first = "Another start is installing: waiting until it has finished ...\n"
    assert second.stdout.readline() == told_first
    (tmp_path / "go on").write_text("")
    outputs = [process.communicate()[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0]
    assert all('"tiny": "2.0"' in output for output in outputs)
    assert "Installing" not in outputs[1], "the second found everything there"


def test_a_package_whose_installation_was_killed_is_installed_again(
    started: Checkout, tmp_path: Path
) -> None:
    started.file(SERVICE_LOCK).write_text(write_wheel(started.file(WHEELS), "2.0"))
    (site,) = started.file(".venv").glob("lib/*/site-packages")
    # Debian's sitecustomize would hide that of the environment.
    (site / "kill.py").write_text(KILL)
    (site / "kill.pth").write_text("import kill\n")
    killed = started.start("local cpu")
    assert killed.returncode == -signal.SIGKILL
    (site / "kill.pth").unlink()
    repaired = started.start("local cpu")
    assert read_app_output(repaired)["tiny"] == "2.0"
    assert "Making" not in repaired.stdout
    # Killed a moment later, before the last file.
    (site / "tiny-2.0.dist-info" / "INSTALLER").unlink()
    (site / "tiny.py").unlink()
    assert read_app_output(started.start("local cpu"))["tiny"] == "2.0"


def test_a_broken_environment_is_made_again(started: Checkout, tmp_path: Path) -> None:
    """The error names the log of pip; a link is replaced, not followed."""
    first, target = started.file(".venv"), tmp_path / "target"
    target.mkdir()
    (target / "file").touch()
    shutil.rmtree(first)
    first.symlink_to(target)
    requirements = started.file(SERVICE_LOCK)
    before = requirements.read_text()
    requirements.write_text(before.replace("sha256:", "sha256:0"))
    failed = started.start("local cpu", PIP_RETRIES="0")
    details = "which takes a few minutes; .venv/install.log has the details."
    assert failed.stdout.splitlines() == [
        f"The first start installs into .venv, {details}",
        "Installing the launcher's packages ...",
        "Installing PyTorch ...",
        "Installing the other packages ...",
    ]
    (sentence,) = failed.stderr.splitlines()
    could_not = "start_server: pip could not install requirements/service.lock (THESE "
    assert sentence.startswith(could_not)
    assert sentence.endswith("; .venv/install.log has the details.")
    assert not first.is_symlink()
    assert [*target.iterdir()] == [target / "file"]
    log = (first / "install.log").read_text()
    assert "Processing " in log
    assert "ERROR: " in log
    requirements.write_text(before)
    assert read_app_output(started.start("local cpu"))["tiny"] == "1.0"


def test_a_python_without_venv_is_reported(checkout: Checkout) -> None:
    """Debian packages Python without that module."""
    result = checkout.start("local cpu", PYTHON=checkout.prepared_python(HIDE))
    assert result.returncode == 1
    assert "-m venv' could not make .venv: " in result.stderr
    assert "No module named venv" in result.stderr


@pytest.mark.parametrize("condition", [read_only, give_up_rights])
def test_a_read_only_folder_is_reported(checkout: Checkout, condition) -> None:
    result = checkout.start("local cpu", condition(checkout.folder))
    assert result.returncode == 1
    (sentence,) = result.stderr.splitlines()
    assert re.match("start_server: .* could not make .venv: .*(Read-only|denied)", sentence)
