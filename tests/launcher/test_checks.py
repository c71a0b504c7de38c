"""A port that is taken and a disk that is too small: told before anything is made or removed."""

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.checks import need_of, port_of
from launcher.console import LaunchError
from launcher.docker import require_container
from tests.launcher.checkout import ROOT, Checkout, add_program, docker
from tests.support.disks import small

HERE = socket.gethostname()


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


def say_need(checkout: Checkout, need: str) -> None:
    """Have its requirements say what they take."""
    file = checkout.file("requirements-cpu.txt")
    file.write_text(f"{need}\n{file.read_text()}")


def too_small(needed: str, disk: Path, advice: str) -> str:
    here = f"on the disk of {disk}, which has 0.0 GB free"
    return f"installing takes about {needed} GB {here}: {advice}."


def test_a_disk_too_small_for_the_packages_or_their_downloads_is_told(
    checkout: Checkout, disk: Path
) -> None:
    """They take what torch takes on a CPU; the checkout is copied to the disk in the first case."""
    ours = (ROOT / "requirements-cpu.txt").read_text().splitlines()
    say_need(checkout, next(line for line in ours if line.startswith("# Disk space")))
    copy = ["sh", "-c", f'{shutil.which("cp")} -R "$1/." "$2" && shift 2 && exec "$@"', "sh"]
    there = Checkout(disk, checkout.tools)
    said = there.refusal("local cpu", [*small(disk), *copy, str(checkout.folder), str(disk)])
    assert said == too_small("1.5", disk, "make room there")
    said = checkout.refusal("local cpu", small(disk), TMPDIR=str(disk))
    assert said == too_small("0.5", disk, "make room there, or set TMPDIR to a larger disk")
    assert not checkout.file(".venv").exists()


def test_where_packages_and_downloads_share_a_disk_their_needs_add_up_unless_all_is_there(
    started: Checkout, tmp_path: Path
) -> None:
    say_need(started, "# Disk space: 100000000 MB, and 100000000 MB for downloads.")
    assert started.start("local cpu", TMPDIR=str(tmp_path)).returncode == 0
    shutil.rmtree(started.file(".venv"))
    said = started.refusal("local cpu", TMPDIR=str(tmp_path))
    assert said.startswith("installing takes about 200000.0 GB on the disk")


def test_a_disk_too_small_for_the_image_is_told(checkout: Checkout, disk: Path) -> None:
    add_program(checkout.tools, "docker", docker(Name=HERE, DockerRootDir=str(disk)))
    said = checkout.refusal("docker cpu", small(disk))
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


def test_a_taken_port_is_told_before_anything_is_installed(checkout: Checkout, taken: str) -> None:
    assert checkout.refusal("local cpu", PORT=taken) == taken_sentence(taken)
    checkout.file(".env").write_text(f"PORT={taken}\n")
    assert checkout.refusal("local cpu", PORT="") == taken_sentence(taken)
    assert not checkout.file(".venv").exists()


@pytest.mark.parametrize("port", ["http", "65536", "-1", "80.5", "²"])
def test_a_port_that_is_none_is_told_too(port: str) -> None:
    with pytest.raises(LaunchError, match=f"PORT={port} is not a port: it is a number from 0 to"):
        port_of({"PORT": port})


@pytest.mark.parametrize(
    ("name", "published", "is_refused"),
    [
        pytest.param(HERE, None, True, id="native"),
        pytest.param("docker-desktop", None, True, id="desktop"),
        pytest.param("another-machine", None, False, id="elsewhere"),
        pytest.param(HERE, "127.0.0.1:{}", False, id="our container"),
    ],
)
def test_a_taken_port_is_told_before_an_image_is_built_where_it_is_one_of_the_daemons(
    tools: Path, monkeypatch, taken: str, name: str, published: str | None, is_refused: bool
) -> None:
    known = {} if published is None else {"published": published.format(taken)}
    add_program(tools, "docker", docker(Name=name, **known))
    monkeypatch.setenv("PATH", str(tools))
    if is_refused:
        with pytest.raises(LaunchError, match=taken_sentence(taken)):
            require_container("cpu", {"PORT": taken})
    else:
        require_container("cpu", {"PORT": taken})
