"""A port that is taken, or is none: told before minutes of installing or building."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.checkout import add_docker, make_checkout, needs_bash, start

pytestmark = needs_bash

HERE = {"Name": socket.gethostname()}
DESKTOP = {"Name": "docker-desktop"}
ELSEWHERE = {"Name": "another-machine"}


@pytest.fixture
def taken() -> Iterator[str]:
    """A port on which another program listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield str(listener.getsockname()[1])


def failing_start(*arguments: str, script: Path, **variables: str) -> str:
    """Return the one sentence."""
    result = start(*arguments, script=script, **variables)
    assert (result.returncode, result.stdout) == (1, "")
    (sentence,) = result.stderr.splitlines()
    return sentence


def sentence_of(port: str) -> str:
    return (
        f"start_server: port {port} of 127.0.0.1 is taken: end what listens there, or set another "
        "PORT."
    )


def test_a_taken_port_is_told_before_anything_is_installed(tmp_path: Path, taken: str) -> None:
    script = make_checkout(tmp_path / "checkout")
    assert failing_start("local", "cpu", script=script, PORT=taken) == sentence_of(taken)
    script.with_name(".env").write_text(f"PORT={taken}\n")
    assert failing_start("local", "cpu", script=script, PORT="") == sentence_of(taken)
    assert not script.with_name(".venv").exists()


@pytest.mark.parametrize("port", ["http", "65536", "-1", "80.5", "²"])
def test_a_port_that_is_none_is_told_too(tmp_path: Path, port: str) -> None:
    script = make_checkout(tmp_path / "checkout")
    assert failing_start("local", "cpu", script=script, PORT=port) == (
        f"start_server: PORT={port} is not a port: it is a number from 0 to 65535."
    )


def test_an_address_that_is_not_this_machines_is_told(tmp_path: Path) -> None:
    script = make_checkout(tmp_path / "checkout")
    assert failing_start("local", "cpu", script=script, HOST="203.0.113.7").startswith(
        "start_server: HOST=203.0.113.7 PORT=0 cannot be listened on: "
    )


@pytest.mark.parametrize("daemon", [HERE, DESKTOP], ids=["native", "desktop"])
def test_a_taken_port_is_told_before_an_image_is_built(
    tools: Path, taken: str, daemon: dict[str, str]
) -> None:
    add_docker(tools, **daemon)
    result = start("docker", "cpu", PATH=str(tools), PORT=taken)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == f"{sentence_of(taken)}\n"


def test_a_port_of_this_machine_says_nothing_of_a_daemon_elsewhere(tools: Path, taken: str) -> None:
    add_docker(tools, **ELSEWHERE)
    assert start("docker", "cpu", PATH=str(tools), PORT=taken).returncode == 0


def test_a_port_that_our_own_container_holds_is_no_obstacle(tools: Path, taken: str) -> None:
    add_docker(tools, published=f"127.0.0.1:{taken}", **HERE)
    assert start("docker", "cpu", PATH=str(tools), PORT=taken).returncode == 0
