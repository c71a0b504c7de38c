"""A port that is taken and a disk that is too small: told before anything is made or removed."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.checks import need_of, port_of
from launcher.console import LaunchError
from tests.launcher.checkout import (
    BASH,
    ROOT,
    add_docker,
    make_checkout,
    needs_bash,
    refused,
    run,
    sentence_of,
    start,
)
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


def too_small(needed: str, disk: Path, advice: str) -> str:
    here = f"on the disk of {disk}, which has 0.0 GB free"
    return f"installing takes about {needed} GB {here}: {advice}."


def test_a_disk_too_small_for_the_packages_or_their_downloads_is_told(
    script: Path, disk: Path
) -> None:
    said = sentence_of(run([*small(disk), *launcher_in(disk)]))
    assert said == too_small("2.0", disk, "make room there")
    command = [*small(disk), str(BASH), str(script), "local", "cpu"]
    said = sentence_of(run(command, TMPDIR=str(disk)))
    assert said == too_small("0.5", disk, "make room there, or set TMPDIR to a larger disk")
    assert not script.with_name(".venv").exists()


def test_where_packages_and_downloads_share_a_disk_their_needs_add_up(tmp_path: Path) -> None:
    script = make_checkout(tmp_path / "checkout")
    script.with_name("requirements-cpu.txt").write_text(HUNDRED_TERABYTES)
    result = start("local", "cpu", script=script, TMPDIR=str(tmp_path))
    assert result.returncode == 1
    assert result.stderr.startswith("start_server: installing takes about 200000.0 GB on the disk")


def test_an_environment_that_can_be_used_needs_no_room_for_another(started: Path) -> None:
    file = started.with_name("requirements-cpu.txt")
    before = file.read_text()
    file.write_text(HUNDRED_TERABYTES + before)
    result = start("local", "cpu", script=started)
    file.write_text(before)
    assert result.returncode == 0


def test_a_disk_too_small_for_the_image_is_told(tools: Path, disk: Path) -> None:
    add_docker(tools, Name=socket.gethostname(), DockerRootDir=str(disk))
    command = [str(BASH), str(ROOT / "start_server.sh"), "docker", "cpu"]
    said = sentence_of(run([*small(disk), "env", f"PATH={tools}", *command]))
    assert said == too_small("4.0", disk, "make room there ('docker system prune')")


@pytest.mark.parametrize("flavour", ["cpu", "gpu"])
def test_the_requirements_say_what_they_take(flavour: str) -> None:
    need = need_of(ROOT / f"requirements-{flavour}.txt")
    assert need.installed > need.downloaded > 0


@pytest.fixture
def taken() -> Iterator[str]:
    """A port on which another program listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield str(listener.getsockname()[1])


def taken_sentence(port: str) -> str:
    return f"port {port} of 127.0.0.1 is taken: end what listens there, or set another PORT."


def test_a_taken_port_is_told_before_anything_is_installed(tmp_path: Path, taken: str) -> None:
    script = make_checkout(tmp_path / "checkout")
    assert refused("local", "cpu", script=script, PORT=taken) == taken_sentence(taken)
    script.with_name(".env").write_text(f"PORT={taken}\n")
    assert refused("local", "cpu", script=script, PORT="") == taken_sentence(taken)
    assert not script.with_name(".venv").exists()


@pytest.mark.parametrize("port", ["http", "65536", "-1", "80.5", "²"])
def test_a_port_that_is_none_is_told_too(port: str) -> None:
    with pytest.raises(LaunchError, match=f"PORT={port} is not a port: it is a number from 0 to"):
        port_of({"PORT": port})


@pytest.mark.parametrize(
    ("daemon", "is_refused"),
    [
        pytest.param({"Name": socket.gethostname()}, True, id="native"),
        pytest.param({"Name": "docker-desktop"}, True, id="desktop"),
        pytest.param({"Name": "another-machine"}, False, id="elsewhere"),
        pytest.param({"Name": socket.gethostname(), "published": True}, False, id="our container"),
    ],
)
def test_a_taken_port_is_told_before_an_image_is_built_where_it_is_one_of_the_daemons(
    script: Path, tools: Path, taken: str, daemon: dict[str, object], is_refused: bool
) -> None:
    if daemon.get("published"):
        daemon = daemon | {"published": f"127.0.0.1:{taken}"}
    add_docker(tools, **daemon)
    if is_refused:
        said = refused("docker", "cpu", script=script, PATH=str(tools), PORT=taken)
        assert said == taken_sentence(taken)
    else:
        assert start("docker", "cpu", script=script, PATH=str(tools), PORT=taken).returncode == 0
