"""Disks that are too small, made for real: told before anything is fetched or removed."""

import socket
from pathlib import Path

import pytest

from launcher.space import Need, need_of
from tests.launcher.checkout import BASH, ROOT, add_docker, make_checkout, needs_bash, run, start
from tests.support.disks import small

pytestmark = needs_bash

HUNDRED_TERABYTES = "# Disk space: 100000000 MB, and 100000000 MB for downloads.\n"


def launcher_in(folder: Path) -> list[str]:
    """Return a command that copies the checkout beside `folder` into it and starts it there."""
    copy = 'cp -R "$1/." "$2" && exec "$3" "$2/start_server.sh" local cpu'
    return ["sh", "-c", copy, "sh", str(folder.with_name("checkout")), str(folder), str(BASH)]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A launcher whose requirements say that they take what torch takes on a CPU."""
    script = make_checkout(tmp_path / "checkout")
    ours = (ROOT / "requirements-cpu.txt").read_text().splitlines()
    (need,) = [line for line in ours if line.startswith("# Disk space")]
    file = script.with_name("requirements-cpu.txt")
    file.write_text(f"{need}\n{file.read_text()}")
    return script


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


def test_a_disk_too_small_for_the_packages_is_told(script: Path, disk: Path) -> None:
    result = run([*small(disk), *launcher_in(disk)])
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        f"start_server: installing takes about 2.0 GB on the disk of {disk}, which has 0.0 GB "
        "free: make room there.\n"
    )


def test_a_disk_too_small_for_the_downloads_is_told(script: Path, disk: Path) -> None:
    command = [str(BASH), str(script), "local", "cpu"]
    result = run([*small(disk), *command], TMPDIR=str(disk))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        f"start_server: installing takes about 0.5 GB on the disk of {disk}, which has 0.0 GB "
        "free: make room there, or set TMPDIR to a larger disk.\n"
    )
    assert not script.with_name(".venv").exists()


def test_where_packages_and_downloads_share_a_disk_their_needs_add_up(tmp_path: Path) -> None:
    script = make_checkout(tmp_path / "checkout")
    script.with_name("requirements-cpu.txt").write_text(HUNDRED_TERABYTES)
    result = start("local", "cpu", script=script, TMPDIR=str(tmp_path))
    assert result.returncode == 1
    assert result.stderr.startswith("start_server: installing takes about 200000.0 GB on the disk")


def test_an_environment_that_can_be_used_needs_no_room_for_another(script: Path) -> None:
    assert start("local", "cpu", script=script).returncode == 0
    file = script.with_name("requirements-cpu.txt")
    file.write_text(HUNDRED_TERABYTES + file.read_text())
    assert start("local", "cpu", script=script).returncode == 0


def test_a_disk_too_small_for_the_image_is_told(tools: Path, disk: Path) -> None:
    add_docker(tools, Name=socket.gethostname(), DockerRootDir=str(disk))
    command = [str(BASH), str(ROOT / "start_server.sh"), "docker", "cpu"]
    result = run([*small(disk), "env", f"PATH={tools}", *command])
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        f"start_server: installing takes about 4.0 GB on the disk of {disk}, which has 0.0 GB "
        "free: make room there ('docker system prune').\n"
    )


@pytest.mark.parametrize("flavour", ["cpu", "gpu"])
def test_the_requirements_say_what_they_take(flavour: str) -> None:
    need = need_of(ROOT / f"requirements-{flavour}.txt")
    assert need.installed > need.downloaded > 0


def test_requirements_that_do_not_say_what_they_take_take_nothing() -> None:
    assert need_of(ROOT / "requirements-demo.txt") == Need(0, 0)
