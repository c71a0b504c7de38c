"""The choice of the device, unusable GPUs, and the settings for usable ones."""

from pathlib import Path

import pytest

from launcher import gpu
from launcher.gpu import choose_flavour, device_variables, find_gpu_problem, tune_reranker
from tests.launcher.checkout import QWEN, Checkout, add_program
from tests.support.nvidia_driver import install_driver


@pytest.mark.parametrize(
    ("argument", "setting", "device"),
    [
        ("cpu", None, "cpu"),
        *(("cpu", setting, "cpu") for setting in ("cuda:1", "auto", "mps")),
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


OLD = "the NVIDIA driver is too old: it knows CUDA up to 12.4, and local gpu needs 13.0"
NONE_WORKS = "local gpu needs an NVIDIA GPU, and the driver finds none that works"
SEE = "see the output of nvidia-smi"
MISSING = "local gpu needs an NVIDIA GPU, and its driver ({}) was not found: install it"


@pytest.mark.parametrize(
    ("driver", "problem"),
    [
        pytest.param(None, MISSING, id="missing"),
        pytest.param({"cuda": 13_000, "gpus": 0}, f"{NONE_WORKS}: {SEE}", id="no GPU"),
        pytest.param({"cuda": 13_000, "init": 100}, f"{NONE_WORKS}: {SEE}", id="cuInit fails"),
        pytest.param({"cuda": 13_000}, None, id="works"),
    ],
)
def test_an_unusable_driver_is_found(
    tmp_path: Path, monkeypatch, driver: dict[str, int] | None, problem: str | None
) -> None:
    if driver is not None:
        install_driver(tmp_path, **driver)
    library = str(tmp_path / "libcuda.so.1")
    monkeypatch.setattr(gpu, "LIBRARY", library)
    assert find_gpu_problem() == (problem and problem.format(library))


def test_an_unusable_driver_is_reported_before_the_download_and_auto_uses_the_cpu(
    tmp_path: Path, started: Checkout
) -> None:
    variables = install_driver(tmp_path, 12_040)
    remedy = "install driver 580 or newer, or use 'start_server.sh local cpu'."
    assert started.refusal("local gpu", **variables) == f"{OLD}: {remedy}"
    assert not started.file(".venv-gpu").exists()
    add_program(started.tools, "nvidia-smi", "echo GPU 0")
    result = started.start("local auto", **variables)
    assert result.stdout.startswith(f"The GPU is not used: {OLD}: ")
    assert '"DEVICE": "cpu"' in result.stdout
