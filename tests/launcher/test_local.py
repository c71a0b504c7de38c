"""The server on this machine: the app as the launcher starts it, and the demo."""

import json
import re
import signal
from pathlib import Path

import pytest

from launcher import local, venv
from tests.launcher.checkout import (
    QWEN,
    ROOT,
    add_program,
    begin,
    needs_bash,
    start,
    told,
)

pytestmark = needs_bash


def test_the_app_runs_in_the_checkout_with_its_own_python_and_gets_the_signals(
    started: Path,
) -> None:
    process = begin("local", "cpu", script=started)
    output, _ = process.communicate()
    assert json.loads(output.splitlines()[-1]) == {
        "DEVICE": "cpu",
        "tiny": "1.0",
        "prefix": str(started.parent / ".venv"),
        "folder": str(started.parent),
        "pid": str(process.pid),
        "FLAGS": "",
    }


@pytest.mark.parametrize(
    ("line", "variables", "dotenv", "device"),
    [
        ("cpu", {"DEVICE": "cuda"}, "", "cpu"),
        ("cpu", {"device": "cuda:1"}, "", "cpu"),
        ("CPU", {}, "HOST=0.0.0.0\nDEVICE=auto\n", "cpu"),
        ("cpu", {"DEVICE": "mps"}, "DEVICE=cuda\n", "cpu"),
        ("cpu", {"DEVICE": "cpu:0,cpu:1"}, "", "cpu:0,cpu:1"),
        ("auto", {"DEVICE": "mps"}, "", "mps"),
        ("auto", {}, "# DEVICE=cuda\n", "cpu"),
        # Beside a GPU.
        ("auto", {"DEVICE": "CPU", "nvidia-smi": "works"}, "", "CPU"),
    ],
)
def test_the_argument_decides_on_the_device_and_auto_follows_the_setting(
    started: Path, tools: Path, line: str, variables: dict[str, str], dotenv: str, device: str
) -> None:
    if "nvidia-smi" in variables:
        add_program(tools, "nvidia-smi", "exit 0")
    started.with_name(".env").write_text(dotenv)
    found = told(start("local", line, script=started, **variables, PATH=str(tools)))
    started.with_name(".env").unlink()
    assert found["DEVICE"] == device
    assert "device" not in found


def test_demo_makes_its_model_and_says_so_to_the_service(started: Path) -> None:
    settings = started.with_name(".env")
    settings.write_text("DENSE_EMBEDDING_MODEL=Qwen/Qwen3-Embedding-0.6B\n")
    first = start("local", "cpu", "--DEMO", script=started, EMBEDDING_MODEL="another/model", **QWEN)
    settings.unlink()
    found = told(first)
    assert found["FLAGS"] == "--demo"
    assert "QWEN_RERANK_BATCH_SIZE" not in found
    assert started.with_name("smart-embedder-demo").is_dir()
    assert "Installing the demo's package" in first.stdout
    assert "Installing" not in start("local", "cpu", "--demo", script=started).stdout


def test_demo_refuses_a_package_with_another_hash(started: Path) -> None:
    requirements = started.parent / "requirements/demo.txt"
    before = requirements.read_text()
    requirements.write_text(re.sub("sha256:.*", "sha256:" + "0" * 64, before))
    result = start("local", "cpu", "--demo", script=started)
    requirements.write_text(before)
    assert result.returncode == 1
    assert "start_server: pip could not install requirements/demo.txt" in result.stderr


def test_on_windows_the_launcher_waits_for_the_app_and_passes_on_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
