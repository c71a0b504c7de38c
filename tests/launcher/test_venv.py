"""The virtual environment: made, repaired, and installed only where something changed."""

import os
import platform
import signal
import socket
import sys
from pathlib import Path

import pytest

from launcher import venv
from tests.launcher.checkout import Checkout, locked, told, write_wheel
from tests.support.disks import give_up_rights, read_only

SERVICE_LOCK = "requirements/service.lock"
HIDE = """
import importlib.machinery, sys
class Path(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name == {module!r} else super().find_spec(name, path, target)
sys.meta_path = [Path if finder.__name__ == "PathFinder" else finder
                 for finder in sys.meta_path if hasattr(finder, "__name__")]
"""

# At the moment when pip writes a package's first file.
KILL = """
import os, signal, sys
def kill(event, arguments):
    if event == "open" and str(arguments[0]).endswith("site-packages/tiny.py"):
        if arguments[2] & (os.O_WRONLY | os.O_RDWR):
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(kill)
"""


def change_kernels(checkout: Checkout, text: str = "changed") -> None:
    """Have the next start build them."""
    (checkout.folder / venv.KERNELS / "rows.c").write_text(text)


def test_a_start_installs_only_what_changed(started: Checkout, tmp_path: Path) -> None:
    # Nor is another Python needed than that of the environment.
    again = started.start("local cpu", PYTHON="")
    assert "Installing" not in again.stdout
    started.file(SERVICE_LOCK).write_text(locked(write_wheel(tmp_path, "2.0")))
    changed = started.start("local cpu")
    assert "Installing" in changed.stdout
    assert "Making" not in changed.stdout
    assert told(changed)["tiny"] == "2.0"


def test_the_kernels_are_built_once_for_each_state_and_cost_speed_alone_where_they_are_not(
    started: Checkout,
) -> None:
    change_kernels(started)
    failed = started.start("local cpu", BUILD_FAILS="1")
    slower = "Going on without them, slower: the kernels could not be built (no compiler); "
    assert slower in failed.stdout
    assert told(failed)
    change_kernels(started, "changed again")
    for builds in (True, False):
        result = started.start("local cpu")
        assert ("Building the kernels" in result.stdout) == builds
        assert told(result)


def test_a_failed_install_is_an_error_and_leaves_the_environment_alone(started: Checkout) -> None:
    requirements = started.file(SERVICE_LOCK)
    before = requirements.read_text()
    requirements.write_text(before.replace("tiny-1.0", "missing-1.0"))
    failed = started.start("local cpu")
    assert failed.returncode == 1
    assert "start_server: pip could not install requirements/service.lock" in failed.stderr
    requirements.write_text(before)
    again = started.start("local cpu")
    assert told(again)["tiny"] == "1.0"
    assert "Making" not in again.stdout


def test_a_second_start_waits_until_the_first_has_installed_and_taken_the_port(
    started: Checkout, tmp_path: Path
) -> None:
    """A port that another program has taken meanwhile is told."""
    started.file(SERVICE_LOCK).write_text(locked(write_wheel(tmp_path, "2.0")))
    change_kernels(started)
    os.mkfifo(tmp_path / "go on")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    waits = {"BUILD_WAITS_FOR": str(tmp_path / "go on"), "PORT": port}
    first = started.begin("local cpu", **waits)
    assert first.stdout
    shown = "".join(iter(first.stdout.readline, "Building the kernels ...\n"))
    assert "Installing" in shown
    second = started.begin("local cpu")
    assert second.stdout
    told_first = "Another start is installing: waiting until it has finished ...\n"
    assert second.stdout.readline() == told_first
    with socket.create_server(("127.0.0.1", int(port))):
        (tmp_path / "go on").write_text("")
        refused, output = (process.communicate()[0] for process in (first, second))
    assert [first.returncode, second.returncode] == [1, 0]
    assert refused.splitlines()[-1] == (
        f"start_server: port {port} of 127.0.0.1 is taken: end what listens there, or set another "
        "PORT."
    )
    assert '"tiny": "2.0"' in output
    assert "Installing" not in output, "the second found everything there"


def test_what_is_half_installed_is_made_anew_and_each_device_keeps_its_own(
    started: Checkout, tmp_path: Path
) -> None:
    """One start is killed in the middle of installing; the next ones cannot make it anew.

    What pip says is in a log that the failure names.
    """
    requirements = started.file(SERVICE_LOCK)
    newer = locked(write_wheel(tmp_path, "2.0"))
    requirements.write_text(newer)
    (tmp_path / "sitecustomize.py").write_text(KILL)
    killed = started.start("local cpu", PYTHONPATH=str(tmp_path))
    assert killed.returncode == -signal.SIGKILL
    (tmp_path / "sitecustomize.py").unlink()
    (tmp_path / "venv.py").write_text(
        "import pathlib, sys\npathlib.Path(sys.argv[1], 'bin').mkdir()\nsys.exit('half')\n"
    )
    failed = started.start("local cpu", PYTHONPATH=str(tmp_path))
    assert failed.returncode == 1
    assert "-m venv' could not make .venv. It said: half\n" in failed.stderr
    first, second = started.file(".venv"), started.file(".venv-gpu")
    assert (first / "bin").is_dir()

    requirements.write_text(newer.replace("sha256:", "sha256:0"))
    failed = started.start("local cpu", PIP_RETRIES="0")
    first_start, *steps = failed.stdout.splitlines()
    details = "which takes a few minutes; .venv/install.log has the details."
    assert first_start == f"The first start installs into .venv, {details}"
    assert steps == [
        f"Making .venv with Python {platform.python_version()} ...",
        "Installing PyTorch ...",
        "Installing the other packages ...",
    ]
    (sentence,) = failed.stderr.splitlines()
    could_not = "start_server: pip could not install requirements/service.lock (THESE "
    assert sentence.startswith(could_not)
    assert sentence.endswith("; .venv/install.log has all that it said.")
    log = (first / "install.log").read_text()
    assert "Processing " in log
    assert "ERROR: " in log

    # It is an environment of this device all the same.
    requirements.write_text(newer)
    other = started.start("local gpu", DEVICE="mps", PYTHON=str(first / "bin" / "python"))
    assert "Making .venv-gpu" in other.stdout
    assert told(other)["prefix"] == str(second)
    repaired = started.start("local cpu")
    assert "Making" not in repaired.stdout
    assert (told(repaired)["prefix"], told(repaired)["tiny"]) == (str(first), "2.0")
    for flavour, variables, folder in (("cpu", {}, first), ("gpu", {"DEVICE": "mps"}, second)):
        again = started.start(f"local {flavour}", **variables)
        assert told(again)["prefix"] == str(folder)
        assert "Installing" not in again.stdout


def test_removing_an_environment_that_is_a_link_leaves_what_it_points_to(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / ".venv"
    target.mkdir()
    link.symlink_to(target)
    venv.remove(link)
    assert target.is_dir()
    assert not link.is_symlink()


@pytest.mark.parametrize("module", ["ensurepip", "venv"])
def test_a_python_packaged_without_venv_is_told_what_to_install(
    checkout: Checkout, tmp_path: Path, module: str
) -> None:
    """As Debian packages it: Python finds no such module."""
    (tmp_path / "sitecustomize.py").write_text(HIDE.format(module=module))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert checkout.refusal("local cpu", PYTHONPATH=str(tmp_path)) == (
        f"Python {version} lacks its module {module}, which makes virtual "
        f"environments: on Debian and Ubuntu 'apt-get install python{version}-venv' adds it."
    )


@pytest.mark.parametrize("condition", [read_only, give_up_rights])
def test_a_folder_that_cannot_be_written_is_told(checkout: Checkout, condition) -> None:
    result = checkout.start("local cpu", condition(checkout.folder))
    assert result.returncode == 1
    (sentence,) = result.stderr.splitlines()
    assert sentence.startswith(f"start_server: .venv cannot be written in {checkout.folder}: ")
