"""GPUs that cannot be used are told before anything is made; what follows from those that can."""

import ctypes
from pathlib import Path

import pytest

from launcher import venv
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
    ("report", "limits"),
    [
        ("4096\n", RerankLimits(4, 4096)),
        ("6144\n", RerankLimits(4, 4096)),
        ("6145\n", RerankLimits(8, 8192)),
        ("8192\n", RerankLimits(8, 8192)),
        ("8193\n", RerankLimits(16, 8192)),
        # The smallest counts.
        ("24576\r\n6144\r\n", RerankLimits(4, 4096)),
        ("[N/A]\n", None),
        ("", None),
    ],
)
def test_gpu_memory_sets_the_limits_of_the_qwen_reranker(report: str, limits) -> None:
    memory = smallest_memory(report)
    assert (memory and gpu_limits(memory)) == limits


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
SEE = "see what nvidia-smi says"


@pytest.mark.parametrize(
    ("driver", "problem", "remedy"),
    [
        pytest.param({"cuda": 12_040}, OLD, "install driver 580 or newer", id="too old"),
        pytest.param({"cuda": 13_000, "gpus": 0}, NONE_WORKS, SEE, id="no GPU"),
        pytest.param({"cuda": 13_000, "init": 100}, NONE_WORKS, SEE, id="cuInit fails"),
    ],
)
def test_a_driver_that_torch_could_not_use_is_told_before_anything_is_fetched_or_leaves_the_cpu(
    tmp_path: Path, script: Path, started: Path, tools: Path, driver, problem: str, remedy: str
) -> None:
    variables = install_driver(tmp_path, **driver)
    said = refused("local", "gpu", script=script, **variables)
    assert said == f"{problem}: {remedy}, or use 'start_server.sh local cpu'."
    assert not script.with_name(".venv").exists()
    add_nvidia_smi(tools, "8188")
    result = start("local", "auto", script=started, PATH=str(tools), **variables)
    assert result.stdout.startswith(f"The GPU is not used: {problem}: ")
    assert told(result)["DEVICE"] == "cpu"


def test_with_a_driver_and_a_gpu_the_app_is_started_on_it(
    tmp_path: Path, own_started: Path
) -> None:
    script = own_started
    stamp = venv.Venv(script.with_name(".venv")).stamp
    # As if its first start had been on a GPU; in this checkout both install the same.
    stamp("cpu").rename(stamp("gpu"))
    driver = install_driver(tmp_path, 13_010, gpus=2)
    found = told(start("local", "gpu", script=script, DEVICE="cpu", **driver))
    assert (found["DEVICE"], found["prefix"]) == ("cuda", str(script.with_name(".venv")))
    assert found["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    script.with_name(".env").write_text("DEVICE=cuda:1\nPYTORCH_CUDA_ALLOC_CONF=backend:native\n")
    found = told(start("local", "gpu", script=script, **driver))
    assert "DEVICE" not in found
    assert found["PYTORCH_CUDA_ALLOC_CONF"] == "backend:native"
