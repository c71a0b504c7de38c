"""Qwen3-Reranker against transformers' own padded forward."""

import json
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import structlog
import torch
from sentence_transformers import CrossEncoder
from transformers import Qwen3Model

from smart_embedder.engine.records import Outputs
from smart_embedder.errors import StartupError
from smart_embedder.models.families.backbone import Target
from smart_embedder.models.tasks.qwen3 import DEFAULT_INSTRUCTION, QwenReranker, load_qwen_reranker
from tests.support.checkpoints import corpus, save_qwen
from tests.support.texts import varied_texts
from tests.support.wordpiece import change
from tools.references import qwen

LIMIT = 330


@pytest.fixture(scope="module")
def folder(tiny_qwen: Path) -> Path:
    return tiny_qwen


@pytest.fixture(scope="module")
def reranker(folder: Path, float32_target: Target) -> QwenReranker:
    return load_qwen_reranker("tiny", folder, LIMIT, 16, float32_target)


@pytest.mark.parametrize("instruction", [None, "Find the recipe"])
@pytest.mark.parametrize("query", ["hybrid search", "検索 の言葉 " * 3, "search " * 200])
def test_scores_equal_the_padded_causal_model(
    reranker: QwenReranker, folder: Path, query: str, instruction: str | None
) -> None:
    passages = ["", *varied_texts(45)[4:], " ".join(["vector"] * 300)]
    pairs = reranker.tokenize_pairs(query, passages, instruction)
    ours = reranker.forward([pair.ids for pair in pairs], Outputs())
    theirs = qwen.QwenReranker(folder, LIMIT)
    expected = theirs.scores(query, passages, instruction or DEFAULT_INSTRUCTION)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5)
    assert min(ours) >= 0
    assert max(ours) <= 1


def test_only_the_content_is_cut_and_the_passage_before_the_query(reranker: QwenReranker) -> None:
    cuts = []
    for words in range(1, 400, 7):
        (pair,) = reranker.tokenize_pairs("hybrid search", [" ".join(["vector"] * words)], None)
        prefix, suffix = reranker._template.prefix, reranker._template.suffix
        assert pair.ids[: len(prefix)].tolist() == prefix.tolist()
        assert pair.ids[-len(suffix) :].tolist() == suffix.tolist()
        assert len(pair.ids) <= LIMIT
        assert pair.query_kept == pair.query_tokens
        cuts.append(pair.passage_tokens - pair.passage_kept)
    assert cuts[0] == 0 < cuts[-1]
    assert cuts == sorted(cuts)


def test_counts_are_exact_around_the_limit(folder: Path, float32_target: Target) -> None:
    query, passage = "hybrid search", "vector vector vector vector"
    whole = load_qwen_reranker("tiny", folder, 4096, 16, float32_target)
    (pair,) = whole.tokenize_pairs(query, [passage], None)
    for missing in (-1, 0, 1, 2):
        limit = len(pair.ids) - missing
        tight = load_qwen_reranker("tiny", folder, limit, 16, float32_target)
        (cut,) = tight.tokenize_pairs(query, [passage], None)
        assert cut.passage_tokens == pair.passage_tokens
        assert cut.passage_tokens - cut.passage_kept == max(0, missing)


def test_a_query_longer_than_the_limit_is_reported_and_no_passage_is_read(
    reranker: QwenReranker,
) -> None:
    (pair,) = reranker.tokenize_pairs("search " * 500, ["vector"], None)
    assert pair.query_kept < pair.query_tokens
    assert (pair.passage_kept, pair.passage_tokens > 0) == (0, True)


def largest_allocation(folder: Path, target: Target) -> int:
    """Bytes of the largest single allocation in one forward of 64 pairs."""
    reranker = load_qwen_reranker("wide", folder, 4096, 64, target)
    ids = [pair.ids for pair in reranker.tokenize_pairs("search", corpus(64), None)]
    with torch.profiler.profile(profile_memory=True) as profile:
        reranker.forward(ids, Outputs())
    return max(event.self_cpu_memory_usage for event in profile.events())


def test_memory_does_not_grow_with_the_vocabulary(tmp_path: Path, float32_target: Target) -> None:
    small = save_qwen(tmp_path / "small", vocabulary=1000, layers=1)
    whole = save_qwen(tmp_path / "whole", vocabulary=151_669, layers=1)
    assert largest_allocation(whole, float32_target) == largest_allocation(small, float32_target)


def test_yes_and_no_are_looked_up_in_the_vocabulary(tmp_path: Path, float32_target) -> None:
    folder = save_qwen(tmp_path / "wordless", answers=("da", "net"))
    with pytest.raises(StartupError, match="has no tokens yes and no"):
        load_qwen_reranker("tiny", folder, LIMIT, 16, float32_target)


def test_an_embedding_folder_is_no_reranker(folder: Path, float32_target, tmp_path) -> None:
    copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "1_Pooling").mkdir()
    with pytest.raises(StartupError, match="holds an embedding model and not a reranker"):
        load_qwen_reranker("tiny", tmp_path, LIMIT, 16, float32_target)


def test_of_one_name_only_its_language_model_is_a_reranker(
    folder: Path, float32_target, tmp_path: Path
) -> None:
    other = copytree(folder, tmp_path, dirs_exist_ok=True)
    change(other / "config.json", architectures=["Qwen3ForTokenClassification"])
    with pytest.raises(StartupError, match="holds a Qwen3ForTokenClassification, which is no rera"):
        load_qwen_reranker("tiny", other, LIMIT, 16, float32_target)


def test_tensors_without_a_head_are_no_reranker(
    folder: Path, float32_target, tmp_path: Path
) -> None:
    """Qwen3-Embedding names the same architecture as Qwen3-Reranker."""
    copy = copytree(folder, tmp_path, dirs_exist_ok=True)
    Qwen3Model.from_pretrained(folder, dtype=torch.float32).save_pretrained(copy)
    change(copy / "config.json", architectures=["Qwen3ForCausalLM"])
    with pytest.raises(StartupError, match="it has no head of a language model"):
        load_qwen_reranker("tiny", copy, LIMIT, 16, float32_target)


def test_a_language_model_whose_name_says_nothing_of_reranking_is_logged(
    folder: Path, float32_target
) -> None:
    with structlog.testing.capture_logs() as logged:
        load_qwen_reranker("Qwen/Qwen3-0.6B", folder, LIMIT, 16, float32_target)
        load_qwen_reranker("Qwen/Qwen3-Reranker-0.6B", folder, LIMIT, 16, float32_target)
    warned = [each for each in logged if each["event"] == "language_model_reranks"]
    assert [each["model"] for each in warned] == ["Qwen/Qwen3-0.6B"]


def test_answers_other_than_yes_and_no_are_refused(
    folder: Path, float32_target, tmp_path: Path
) -> None:
    copy = copytree(folder, tmp_path, dirs_exist_ok=True)
    reference = CrossEncoder(str(copy), device="cpu")
    reference.save_pretrained(str(copy))
    (scores,) = [each for each in copy.iterdir() if each.name.endswith("LogitScore")]
    load_qwen_reranker("tiny", copy, LIMIT, 16, float32_target)
    modules = json.loads((copy / "modules.json").read_text())
    kind = "sentence_transformers.base.modules.dense.Dense"
    (copy / "modules.json").write_text(json.dumps([*modules, modules[-1] | {"type": kind}]))
    with pytest.raises(StartupError, match="names the module Dense"):
        load_qwen_reranker("tiny", copy, LIMIT, 16, float32_target)
    (copy / "modules.json").write_text(json.dumps(modules))
    change(scores / "config.json", true_token_id=7)
    with pytest.raises(StartupError, match="compares other tokens than yes and no"):
        load_qwen_reranker("tiny", copy, LIMIT, 16, float32_target)
