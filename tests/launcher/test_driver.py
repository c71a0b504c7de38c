"""`local gpu` where the driver is missing, too old or sees no GPU: told before anything is made."""

import ctypes
from pathlib import Path

import pytest

from launcher.driver import LIBRARY
from tests.launcher.checkout import make_checkout, needs_bash, start, told
from tests.support.nvidia_driver import install_driver

pytestmark = needs_bash


def failing_start(script: Path, **variables: str) -> str:
    """Return the one sentence."""
    result = start("local", "gpu", script=script, **variables)
    assert (result.returncode, result.stdout) == (1, "")
    (sentence,) = result.stderr.splitlines()
    assert not script.with_name(".venv").exists()
    return sentence.removeprefix("start_server: ")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return make_checkout(tmp_path / "checkout")


def test_without_a_driver_it_says_so(script: Path) -> None:
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        assert failing_start(script) == (
            "local gpu needs an NVIDIA GPU, and its driver (libcuda.so.1) was not found: install "
            "it, or use 'start_server.sh local cpu'."
        )
    else:
        pytest.skip("this machine has NVIDIA's driver")


def test_a_driver_too_old_for_the_wheel_is_told_before_it_is_fetched(
    tmp_path: Path, script: Path
) -> None:
    assert failing_start(script, **install_driver(tmp_path, 12_040)) == (
        "the NVIDIA driver is too old: it knows CUDA up to 12.4, and local gpu needs 13.0: "
        "install driver 580 or newer, or use 'start_server.sh local cpu'."
    )


@pytest.mark.parametrize("state", [{"gpus": 0}, {"init": 100}], ids=["no GPU", "cuInit fails"])
def test_a_driver_that_sees_no_gpu_is_told(tmp_path: Path, script: Path, state) -> None:
    assert failing_start(script, **install_driver(tmp_path, 13_000, **state)) == (
        "local gpu needs an NVIDIA GPU, and the driver finds none that works: see what nvidia-smi "
        "says, or use 'start_server.sh local cpu'."
    )


def test_with_a_driver_and_a_gpu_the_app_is_started_on_it(tmp_path: Path, script: Path) -> None:
    driver = install_driver(tmp_path, 13_010, gpus=2)
    found = told(start("local", "gpu", script=script, DEVICE="cpu", **driver))
    assert found["DEVICE"] == "cuda"
    assert found["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    script.with_name(".env").write_text("DEVICE=cuda:1\nPYTORCH_CUDA_ALLOC_CONF=backend:native\n")
    found = told(start("local", "gpu", script=script, **driver))
    assert "DEVICE" not in found
    assert found["PYTORCH_CUDA_ALLOC_CONF"] == "backend:native"
