"""The choice of the device, unusable GPUs, and the settings for usable ones."""

import ctypes
from pathlib import Path

import pytest

from launcher.gpu import LIBRARY, choose_flavour, device_variables, tune_reranker
from tests.launcher.checkout import QWEN, Checkout, add_program, read_app_output
from tests.support.nvidia_driver import install_driver


@pytest.mark.parametrize(
    ("argument", "setting", "device"),
    [
        ("cpu", None, "cpu"),
        *(("cpu", setting, "cpu") for setting in ("cuda", "cuda:1", "auto", "mps")),
        ("cpu", "cpu:0,cpu:1", "cpu:0,cpu:1"),
        ("gpu", "cpu", "cuda"),
        ("gpu", "cuda:1", "cuda:1"),
        ("gpu", "mps", "mps"),
        ("auto", "mps", "mps"),
        ("auto", "auto", "auto"),
        ("auto", None, "cpu"),
        # With a GPU.
        ("auto", "CPU", "CPU"),
    ],
)
def test_the_argument_decides_on_the_device_and_auto_follows_the_setting(
    tools: Path, monkeypatch, argument: str, setting: str | None, device: str
) -> None:
    if device == "CPU":
        add_program(tools, "nvidia-smi", "echo GPU 0")
    monkeypatch.setenv("PATH", str(tools))
    settings = {} if setting is None else {"DEVICE": setting}
    flavour = choose_flavour(argument, settings)
    assert (settings | device_variables(argument, flavour, settings))["DEVICE"] == device


@pytest.mark.parametrize(
    ("report", "limits"),
    [
        ("4096", (4, 4096)),
        ("6144", (4, 4096)),
        ("6145", (8, 8192)),
        ("8192", (8, 8192)),
        ("8193", (16, 8192)),
        # The smallest GPU counts.
        ("24576 6144", (4, 4096)),
        ("[N/A]", None),
        ("", None),
    ],
)
def test_gpu_memory_sets_the_limits_of_the_qwen_reranker(
    tools: Path, monkeypatch, report: str, limits: tuple[int, int] | None
) -> None:
    add_program(tools, "nvidia-smi", f"for memory in {report}; do echo $memory; done")
    monkeypatch.setenv("PATH", str(tools))
    batch, length = limits or ("", "")
    tuned = tune_reranker("gpu", QWEN)
    assert tuned.get("QWEN_RERANK_BATCH_SIZE", "") == str(batch)
    assert tuned.get("QWEN_RERANK_MAX_LENGTH", "") == str(length)
    assert tune_reranker("gpu", QWEN | tuned) == {}


def test_a_missing_driver_is_reported(started: Checkout) -> None:
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        assert started.refusal("local gpu") == (
            "local gpu needs an NVIDIA GPU, and its driver (libcuda.so.1) was not found: install "
            "it, or use 'start_server.sh local cpu'."
        )
    else:
        pytest.skip("this machine has NVIDIA's driver")


OLD = "the NVIDIA driver is too old: it knows CUDA up to 12.4, and local gpu needs 13.0"
NONE_WORKS = "local gpu needs an NVIDIA GPU, and the driver finds none that works"
SEE = "see the output of nvidia-smi"


@pytest.mark.parametrize(
    ("driver", "problem", "remedy"),
    [
        pytest.param({"cuda": 12_040}, OLD, "install driver 580 or newer", id="too old"),
        pytest.param({"cuda": 13_000, "gpus": 0}, NONE_WORKS, SEE, id="no GPU"),
        pytest.param({"cuda": 13_000, "init": 100}, NONE_WORKS, SEE, id="cuInit fails"),
    ],
)
def test_an_unusable_driver_is_reported_before_the_download_and_auto_uses_the_cpu(
    tmp_path: Path, started: Checkout, driver: dict[str, int], problem: str, remedy: str
) -> None:
    variables = install_driver(tmp_path, **driver)
    sentence = started.refusal("local gpu", **variables)
    assert sentence == f"{problem}: {remedy}, or use 'start_server.sh local cpu'."
    assert not started.file(".venv-gpu").exists()
    add_program(started.tools, "nvidia-smi", "echo GPU 0")
    result = started.start("local auto", **variables)
    assert result.stdout.startswith(f"The GPU is not used: {problem}: ")
    assert '"DEVICE": "cpu"' in result.stdout


def test_with_a_driver_and_a_gpu_the_app_is_started_on_it_in_an_environment_of_its_own(
    tmp_path: Path, started: Checkout
) -> None:
    """The allocator and the reranker's limits of .env stay."""
    first, second = started.file(".venv"), started.file(".venv-gpu")
    driver = install_driver(tmp_path, 13_010, gpus=2)
    python = str(first / "bin" / "python")
    result = started.start("local gpu", DEVICE="cpu", PYTHON=python, **driver)
    assert "installs into .venv-gpu" in result.stdout
    found = read_app_output(result)
    assert (found["DEVICE"], found["prefix"]) == ("cuda", str(second))
    assert found["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    for flavour, variables, folder in (("cpu", {}, first), ("gpu", {"DEVICE": "mps"}, second)):
        again = started.start(f"local {flavour}", **variables)
        assert read_app_output(again)["prefix"] == str(folder)
        assert "Installing" not in again.stdout
    lines = ["DEVICE=cuda:1", "PYTORCH_CUDA_ALLOC_CONF=backend:native", "QWEN_RERANK_BATCH_SIZE=2"]
    lines += [f"RERANKER_MODEL={QWEN['RERANKER_MODEL']}"]
    started.file(".env").write_text("\n".join(lines))
    add_program(started.tools, "nvidia-smi", "echo 24576")
    found = started.app_output("local gpu", **driver)
    assert not {"DEVICE", "QWEN_RERANK_BATCH_SIZE"} & {*found}
    assert found["PYTORCH_CUDA_ALLOC_CONF"] == "backend:native"
    assert found["QWEN_RERANK_MAX_LENGTH"] == "8192"
