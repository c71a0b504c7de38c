"""GPUs that cannot be used are told before anything is made; what follows from those that can."""

import ctypes
from pathlib import Path

import pytest

from launcher.gpu import LIBRARY, RerankLimits, gpu_limits, smallest_memory, tune_reranker
from tests.launcher.checkout import (
    QWEN,
    add_nvidia_smi,
    make_checkout,
    needs_bash,
    refused,
    start,
    told,
)
from tests.support.nvidia_driver import install_driver

pytestmark = needs_bash


@pytest.mark.parametrize(
    ("memory_mib", "limits"),
    [
        (4096, RerankLimits(4, 4096)),
        (6144, RerankLimits(4, 4096)),
        (6145, RerankLimits(8, 8192)),
        (8188, RerankLimits(8, 8192)),
        (8192, RerankLimits(8, 8192)),
        (8193, RerankLimits(16, 8192)),
        (143_771, RerankLimits(16, 8192)),
    ],
)
def test_gpu_memory_sets_the_limits_of_the_qwen_reranker(
    memory_mib: int, limits: RerankLimits
) -> None:
    assert gpu_limits(memory_mib) == limits


@pytest.mark.parametrize(
    ("report", "memory_mib"),
    [("8188\n", 8188), ("24576\r\n6144\r\n", 6144), ("[N/A]\n", None), ("", None)],
)
def test_the_smallest_gpu_counts(report: str, memory_mib: int | None) -> None:
    assert smallest_memory(report) == memory_mib


def test_only_a_qwen_reranker_is_tuned_and_only_where_nothing_is_set() -> None:
    both = {"QWEN_RERANK_BATCH_SIZE": "1", "QWEN_RERANK_MAX_LENGTH": "2048"}
    assert tune_reranker({}, "cpu") == {}
    assert tune_reranker({"RERANKER_MODEL": "BAAI/bge-reranker-v2-m3"}, "cpu") == {}
    assert tune_reranker({"RERANKER_MODEL": "/models/my-QWEN3"}, "cpu") == both
    assert tune_reranker(QWEN | {"QWEN_RERANK_BATCH_SIZE": "3"}, "cpu") == {
        "QWEN_RERANK_MAX_LENGTH": "2048"
    }
    assert tune_reranker(QWEN | both, "cpu") == {}


def test_the_app_gets_what_is_tuned_and_what_env_files_set_counts(started: Path) -> None:
    settings = started.with_name(".env")
    settings.write_text(f"RERANKER_MODEL={QWEN['RERANKER_MODEL']}\nQWEN_RERANK_BATCH_SIZE=2\n")
    found = told(start("local", "cpu", script=started))
    settings.unlink()
    assert found["QWEN_RERANK_MAX_LENGTH"] == "2048"
    assert "QWEN_RERANK_BATCH_SIZE" not in found


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return make_checkout(tmp_path / "checkout")


def test_without_a_driver_it_says_so(script: Path) -> None:
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        assert refused("local", "gpu", script=script) == (
            "local gpu needs an NVIDIA GPU, and its driver (libcuda.so.1) was not found: install "
            "it, or use 'start_server.sh local cpu'."
        )
    else:
        pytest.skip("this machine has NVIDIA's driver")


OLD = "the NVIDIA driver is too old: it knows CUDA up to 12.4, and local gpu needs 13.0"
NONE_WORKS = "local gpu needs an NVIDIA GPU, and the driver finds none that works"


@pytest.mark.parametrize(
    ("cuda", "state", "sentence"),
    [
        (12_040, {}, f"{OLD}: install driver 580 or newer, "),
        (13_000, {"gpus": 0}, f"{NONE_WORKS}: see what nvidia-smi says, "),
        (13_000, {"init": 100}, f"{NONE_WORKS}: see what nvidia-smi says, "),
    ],
    ids=["too old", "no GPU", "cuInit fails"],
)
def test_a_driver_that_torch_could_not_use_is_told_before_anything_is_fetched(
    tmp_path: Path, script: Path, cuda: int, state: dict[str, int], sentence: str
) -> None:
    driver = install_driver(tmp_path, cuda, **state)
    said = refused("local", "gpu", script=script, **driver)
    assert said == f"{sentence}or use 'start_server.sh local cpu'."
    assert not script.with_name(".venv").exists()


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({"cuda": 12_040}, OLD),
        ({"cuda": 13_000, "gpus": 0}, NONE_WORKS),
    ],
    ids=["too old", "no GPU"],
)
def test_auto_runs_on_the_cpu_where_torch_could_not_use_the_gpu(
    tmp_path: Path, script: Path, tools: Path, facts, problem: str
) -> None:
    add_nvidia_smi(tools, "8188")
    driver = install_driver(tmp_path, **facts)
    result = start("local", "auto", script=script, PATH=str(tools), **driver)
    assert result.stdout.startswith(f"The GPU is not used: {problem}: ")
    assert told(result)["DEVICE"] == "cpu"


def test_with_a_driver_and_a_gpu_the_app_is_started_on_it(tmp_path: Path, script: Path) -> None:
    driver = install_driver(tmp_path, 13_010, gpus=2)
    found = told(start("local", "gpu", script=script, DEVICE="cpu", **driver))
    assert found["DEVICE"] == "cuda"
    assert found["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    script.with_name(".env").write_text("DEVICE=cuda:1\nPYTORCH_CUDA_ALLOC_CONF=backend:native\n")
    found = told(start("local", "gpu", script=script, **driver))
    assert "DEVICE" not in found
    assert found["PYTORCH_CUDA_ALLOC_CONF"] == "backend:native"
