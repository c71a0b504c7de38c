"""Qwen3-Reranker against transformers' padded forward, and its prompt against one text."""

import json
from bisect import bisect_right
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import structlog
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers import CrossEncoder
from tokenizers import Encoding, Tokenizer
from transformers import Qwen3Model

from smart_embedder.engine.records import Outputs, TokenizedPair, TruncationOptions
from smart_embedder.errors import StartupError
from smart_embedder.models.ops.proof import Target
from smart_embedder.models.tasks.dense import DEFAULT_INSTRUCTION
from smart_embedder.models.tasks.rerankers import QwenReranker, QwenTemplate
from smart_embedder.models.text.tokenizer import TextTokenizer
from tests.models.text.test_slices import GAPS, WORDS, qwen_words
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
    return QwenReranker("tiny", folder, LIMIT, 16, float32_target)


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


def largest_allocation(folder: Path, target: Target) -> int:
    """Bytes of the largest single allocation in one forward of 64 pairs."""
    reranker = QwenReranker("wide", folder, 4096, 64, target)
    ids = [pair.ids for pair in reranker.tokenize_pairs("search", corpus(64), None)]
    with torch.profiler.profile(profile_memory=True) as profile:
        reranker.forward(ids, Outputs())
    return max(event.self_cpu_memory_usage for event in profile.events())


def test_memory_does_not_grow_with_the_vocabulary(tmp_path: Path, float32_target: Target) -> None:
    small = save_qwen(tmp_path / "small", vocabulary=1000, layers=1)
    whole = save_qwen(tmp_path / "whole", vocabulary=151_669, layers=1)
    assert largest_allocation(whole, float32_target) == largest_allocation(small, float32_target)


def without_a_head(folder: Path) -> None:
    """Qwen3-Embedding names the same architecture as Qwen3-Reranker."""
    Qwen3Model.from_pretrained(folder, dtype=torch.float32).save_pretrained(folder)
    change(folder / "config.json", architectures=["Qwen3ForCausalLM"])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda folder: save_qwen(folder, answers=("da", "net")),
            "has no tokens yes and no",
        ),
        (
            lambda folder: (folder / "1_Pooling").mkdir(),
            "holds an embedding model and not a reranker",
        ),
        (
            lambda folder: change(folder / "config.json", architectures=["Qwen3ForTokenClassific"]),
            "holds a Qwen3ForTokenClassific, which is no reranker",
        ),
        (without_a_head, "it has no head of a language model"),
    ],
)
def test_what_is_no_reranker_says_why(
    spoil, message, folder: Path, float32_target, tmp_path: Path
) -> None:
    copy = copytree(folder, tmp_path, dirs_exist_ok=True)
    spoil(copy)
    with pytest.raises(StartupError, match=message):
        QwenReranker("tiny", copy, LIMIT, 16, float32_target)


def test_a_language_model_whose_name_says_nothing_of_reranking_is_logged(
    folder: Path, float32_target
) -> None:
    with structlog.testing.capture_logs() as logged:
        QwenReranker("Qwen/Qwen3-0.6B", folder, LIMIT, 16, float32_target)
        QwenReranker("Qwen/Qwen3-Reranker-0.6B", folder, LIMIT, 16, float32_target)
    warned = [each for each in logged if each["event"] == "language_model_reranks"]
    assert [each["model"] for each in warned] == ["Qwen/Qwen3-0.6B"]


def test_answers_other_than_yes_and_no_are_refused(
    folder: Path, float32_target, tmp_path: Path
) -> None:
    copy = copytree(folder, tmp_path, dirs_exist_ok=True)
    reference = CrossEncoder(str(copy), device="cpu")
    reference.save_pretrained(str(copy))
    (scores,) = [each for each in copy.iterdir() if each.name.endswith("LogitScore")]
    QwenReranker("tiny", copy, LIMIT, 16, float32_target)
    modules = json.loads((copy / "modules.json").read_text())
    kind = "sentence_transformers.base.modules.dense.Dense"
    (copy / "modules.json").write_text(json.dumps([*modules, modules[-1] | {"type": kind}]))
    with pytest.raises(StartupError, match="names the module Dense"):
        QwenReranker("tiny", copy, LIMIT, 16, float32_target)
    (copy / "modules.json").write_text(json.dumps(modules))
    change(scores / "config.json", true_token_id=7)
    with pytest.raises(StartupError, match="compares other tokens than yes and no"):
        QwenReranker("tiny", copy, LIMIT, 16, float32_target)


PARTS = st.lists(st.sampled_from([*WORDS, *GAPS, "?", ":", "<", ">:", "1", "search"]), max_size=8)
TEXTS = PARTS.map("".join) | st.text(max_size=20)


@pytest.fixture(scope="module", params=["GPT-2's words", "Qwen's words"])
def tokenizer(request, tiny_qwen: Path) -> Tokenizer:
    if request.param == "Qwen's words":
        return qwen_words(tiny_qwen)
    return Tokenizer.from_file(str(tiny_qwen / "tokenizer.json"))


def as_one_text(tokenizer: Tokenizer, room: int, texts: tuple[str, str, str]) -> dict[str, object]:
    """Ids of the content and counts, by the characters that each token of the whole text covers."""
    instruction, query, passage = texts
    head = f"<Instruct>: {instruction}\n<Query>: "
    middle = f"{query}\n<Document>: "
    whole: Encoding = tokenizer.encode(head + middle + passage, add_special_tokens=False)
    ends = [end for _, end in whole.offsets]
    first_query = bisect_right(ends, len(head))
    first_passage = bisect_right(ends, len(head + middle))
    before = sum(start < len(head + query) for start, _ in whole.offsets)
    after_query = min(first_passage, before)
    kept = min(len(whole.ids), room)
    return {
        "ids": whole.ids[:kept],
        "query_tokens": after_query - first_query,
        "query_kept": max(0, min(kept, after_query) - first_query),
        "passage_tokens": len(whole.ids) - first_passage,
        "passage_kept": max(0, kept - first_passage),
    }


def found(template: QwenTemplate, pair: TokenizedPair) -> dict[str, object]:
    ids, prefix, suffix = (each.tolist() for each in (pair.ids, template.prefix, template.suffix))
    assert (ids[: len(prefix)], ids[len(ids) - len(suffix) :]) == (prefix, suffix)
    return {
        "ids": ids[len(prefix) : len(ids) - len(suffix)],
        "query_tokens": pair.query_tokens,
        "query_kept": pair.query_kept,
        "passage_tokens": pair.passage_tokens,
        "passage_kept": pair.passage_kept,
    }


@given(st.sampled_from(["Find it", "x\n", " "]), TEXTS.filter(str.strip), TEXTS, st.integers(1, 90))
@settings(max_examples=60)
def test_ids_and_counts_are_those_of_the_whole_prompt(
    tokenizer: Tokenizer, instruction: str, query: str, passage: str, room: int
) -> None:
    frame = TextTokenizer(tokenizer, 4096)
    empty = QwenTemplate(frame)
    limit = room + len(empty.prefix) + len(empty.suffix)
    template = QwenTemplate(TextTokenizer(tokenizer, limit))
    pairs = template.pairs(query, [passage, "", f" {passage}"], instruction)
    for text, pair in zip([passage, "", f" {passage}"], pairs, strict=True):
        expected = as_one_text(tokenizer, room, (instruction, query, text))
        assert found(template, pair) == expected


def test_a_lines_end_that_is_one_with_the_querys_last_token_is_of_the_query(
    tokenizer: Tokenizer,
) -> None:
    joining = Tokenizer.from_str(tokenizer.to_str())
    joining.add_tokens(["?\n"])
    template = QwenTemplate(TextTokenizer(joining, 4096))
    room = 4096 - len(template.prefix) - len(template.suffix)
    (pair,) = template.pairs("search?", ["hybrid"], "Find")
    assert found(template, pair) == as_one_text(joining, room, ("Find", "search?", "hybrid"))
    (plain,) = template.pairs("search!", ["hybrid"], "Find")
    assert len(plain.ids) == len(pair.ids) + 1


def test_a_query_of_many_slices_is_counted_as_a_whole(tokenizer: Tokenizer) -> None:
    query, passage = "search vector. " * 400, "hybrid"
    template = QwenTemplate(TextTokenizer(tokenizer, 4096, slice_characters=500))
    room = 4096 - len(template.prefix) - len(template.suffix)
    (pair,) = template.pairs(query, [passage], "Find")
    assert found(template, pair) == as_one_text(tokenizer, room, ("Find", query, passage))


def test_pairs_of_one_query_share_it(tokenizer: Tokenizer) -> None:
    pairs = QwenTemplate(TextTokenizer(tokenizer, 4096)).pairs("search", ["a", "b"], "Find")
    first, second = (pair.sequence._first for pair in pairs)
    assert first is second


@pytest.mark.parametrize("passage", ["", "hybrid", " hybrid search of vectors", "x " * 30])
@pytest.mark.parametrize("most", [1, 2, 5, 200, None])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_passage_is_cut_from_either_side_to_its_own_limit(
    tokenizer: Tokenizer, passage: str, most: int | None, side
) -> None:
    texts = TextTokenizer(tokenizer, 4096)
    template = QwenTemplate(texts)
    cut = TruncationOptions(side=side, max_tokens=most)
    (pair,) = template.pairs("search", [passage], "Find", cut)
    (head,) = template.pairs("search", [""], "Find", TruncationOptions(max_tokens=0))
    whole = texts.encode_plain([f" {passage}"], 4096)[0].ids.tolist()
    count = len(whole) if most is None else min(most, len(whole))
    kept = whole[:count] if side == "right" else whole[len(whole) - count :]
    before = head.ids[: len(head.ids) - len(template.suffix)].tolist()
    assert pair.ids.tolist() == [*before, *kept, *template.suffix]
    assert pair.query_kept == pair.query_tokens == head.query_tokens
    if count == len(whole):
        assert pair.passage_kept == pair.passage_tokens
    elif side == "left":
        assert pair.passage_kept == count
    else:
        assert pair.passage_tokens - pair.passage_kept == len(whole) - count


def test_a_limit_leaves_room_for_a_token_beside_the_template(tokenizer: Tokenizer) -> None:
    whole = QwenTemplate(TextTokenizer(tokenizer, 4096))
    frame = len(whole.prefix) + len(whole.suffix)
    (pair,) = QwenTemplate(TextTokenizer(tokenizer, frame + 1)).pairs("search", ["a"], "Find")
    assert len(pair.ids) == frame + 1
    with pytest.raises(StartupError, match=f"a length limit of {frame} tokens leaves no room besi"):
        QwenTemplate(TextTokenizer(tokenizer, frame))
