"""What follows from the GPUs of the machine."""

from pathlib import Path

import pytest

from launcher.gpu import RerankLimits, gpu_limits, smallest_memory, tune_reranker
from tests.launcher.checkout import QWEN, needs_bash, start, told

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
