"""The server on this machine: the arguments of the app, and the demo."""

import json
import os
import re
import signal
import socket
from pathlib import Path

import pytest
from packaging.markers import default_environment

from launcher import console, local
from launcher.console import LaunchError
from launcher.venv import Venv
from tests.launcher.checkout import ROOT, Checkout, add_program


def test_the_app_runs_in_the_checkout_with_its_own_python_and_gets_the_signals(
    started: Checkout, tmp_path: Path
) -> None:
    """The argument decides on the device, even over a variable in lower case.

    Packages of another environment are ignored.
    """
    started.file(".env").write_text("HOST=127.0.0.1\nDEVICE=auto\n")
    (tmp_path / "json.py").write_text("raise ImportError")
    others = {"PYTHONPATH": str(tmp_path), "PYTHONHOME": str(tmp_path), "PYTHONSAFEPATH": "1"}
    process = started.begin("local CPU", device="cuda:1", **others)
    output, _ = process.communicate()
    assert json.loads(output.splitlines()[-1]) == {
        "DEVICE": "cpu",
        "tiny": "1.0",
        "prefix": str(started.file(".venv")),
        "folder": str(started.folder),
        "pid": str(process.pid),
        "FLAGS": "",
    }


def test_on_windows_the_launcher_returns_the_exit_code_of_the_app(
    tmp_path: Path, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignored: list[object] = []
    monkeypatch.setattr(console, "WINDOWS", True)
    monkeypatch.setattr(signal, "signal", lambda *arguments: ignored.append(arguments))
    add_program(tools, "python.exe", '[[ "$*" == "-m app" ]] && exit 7')
    assert console.exec_program([str(tools / "python.exe"), "-m", "app"]) == 7
    assert ignored == [(signal.SIGINT, signal.SIG_IGN)]


def test_on_windows_pytorch_comes_from_its_index_and_the_demo_from_a_linux_wheel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed: list[tuple[str, ...]] = []
    monkeypatch.chdir(ROOT)
    default_environment()  # Packaging caches it, so that later tests would find Windows.
    monkeypatch.setattr(local.sys, "platform", "win32")
    monkeypatch.setattr(Venv, "pip", lambda _, *arguments: installed.append(arguments))
    monkeypatch.setattr(local, "run_step", lambda *_: None)
    folder = Path("no such folder")
    local.install(Venv(folder), "gpu", demo=True)
    torch, service, demo = installed
    assert torch[1:4] == ("requirements/torch-gpu.lock", "--index-url", local.PYTORCH_INDEX)
    assert re.fullmatch(r"torch==[\d.]+", torch[4])
    assert service[1:] == (local.SERVICE, "--require-hashes", "-r", local.SERVICE)
    assert demo[1:5] == (local.DEMO, "--require-hashes", "-r", local.DEMO)
    assert "manylinux2014_x86_64" in demo
    assert demo[-2:] == ("--target", str(folder / "Lib" / "site-packages"))


DOTENV = """\ufeffDEVICE=cpu:0,cpu:1
# HOST=0.0.0.0
PORT=${MINE:-8123}
export Reranker_Model = 'it # is'  # comment
EMPTY=
HF_HOME=a
HF_HOME=b
"""


def test_env_files_are_read_as_the_app_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment wins, unless it is empty."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text(DOTENV)
    expected = {"DEVICE": "cpu:0,cpu:1", "PORT": "8123", "RERANKER_MODEL": "it # is"}
    expected |= {"HF_HOME": "b"}
    for environment in ({}, {"device": "cpu"}, {"PORT": "", "HF_HOME": "c"}):
        monkeypatch.setattr(os, "environ", environment)
        found = {name.upper(): value for name, value in environment.items() if value}
        assert local.read_settings() == expected | found
    (tmp_path / ".env").write_bytes(b"HOST=\xff")
    with pytest.raises(LaunchError, match=r"\.env cannot be read: 'utf-8' codec"):
        local.read_settings()


@pytest.mark.parametrize("port", ["65536", "-1", "²"])
def test_an_invalid_port_is_reported(port: str) -> None:
    with pytest.raises(LaunchError, match=f"PORT={port} is not a port: set a number from 0 to"):
        local.require_free_port({"PORT": port})


def test_a_port_in_use_is_reported_before_anything_is_installed(started: Checkout) -> None:
    started.file("requirements/service.lock").write_text("missing==1.0\n")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        started.file(".env").write_text(f"PORT={port}\n")
        assert started.refusal("local cpu", PORT="") == (
            f"port {port} of 127.0.0.1 is in use: stop the program there, or set another PORT."
        )


def test_the_launcher_s_packages_are_locked_as_the_service_s() -> None:
    service = (ROOT / local.SERVICE).read_text()
    _, *entries = re.split(r"(?m)^(?=\w)", (ROOT / "requirements/launcher.lock").read_text())
    assert len(entries) == 2
    assert all(entry.rstrip("\n") in service for entry in entries)
