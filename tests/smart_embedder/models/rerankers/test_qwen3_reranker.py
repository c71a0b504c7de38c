"""Qwen3-Reranker, compared with transformers' padded forward, and its template."""

from bisect import bisect_right
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder
from tokenizers import Encoding, Tokenizer
from transformers import Qwen3Config, Qwen3ForSequenceClassification, Qwen3Model

from smart_embedder.errors import StartupError
from smart_embedder.models.heads.dense import DEFAULT_INSTRUCTION
from smart_embedder.models.rerankers.pairs import QwenPairs, TemplatePairs
from smart_embedder.models.rerankers.reranker import Reranker
from smart_embedder.models.rerankers.templates import PREFIX, SUFFIX
from smart_embedder.models.tokenizer import TextTokenizer
from smart_embedder.requests import Outputs, TruncationOptions
from smart_embedder.results import sigmoid
from smart_embedder.tokens import TokenizedPair
from tests.smart_embedder.models.rerankers.test_templates import save_scores
from tests.support.checkpoints import changed_json, corpus, save_qwen
from tests.support.encoders import assert_close, load_scorer, reference_scores, score
from tests.support.texts import varied_texts
from tests.support.wordpiece import change
from tests.support.words import GAPS, WORDS, qwen_words
from tools.references import qwen

LIMIT = 330
# The prompts of Qwen3-Reranker as a chat template for pairs.
PUBLISHED = (
    f"{PREFIX}<Instruct>: {{{{ messages | selectattr('role', 'eq', 'system') "
    f"| map(attribute='content') | first | default('{DEFAULT_INSTRUCTION}') }}}}\n"
    "<Query>: {{ messages[-2].content }}\n<Document>: {{ messages[-1].content }}"
    f"{SUFFIX}\n"
)


@pytest.fixture(scope="module")
def reranker(tiny_qwen: Path) -> Reranker:
    return load_scorer(tiny_qwen, LIMIT)


@pytest.mark.parametrize("instruction", [None, "Find the recipe"])
@pytest.mark.parametrize("query", ["検索 の言葉 " * 3, "search " * 200])
def test_qwen3_reranker_scores_equal_transformers(
    reranker: Reranker, tiny_qwen: Path, query: str, instruction: str | None
) -> None:
    passages = ["", *varied_texts(14)[4:], " ".join(["vector"] * 300)]
    ours = sigmoid(score(reranker, query, passages, instruction))
    theirs = qwen.QwenReranker(tiny_qwen, LIMIT)
    expected = theirs.scores(query, passages, instruction or DEFAULT_INSTRUCTION)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5)


def test_lm_head_in_the_file_counts_even_if_tied(tiny_qwen: Path, tmp_path: Path) -> None:
    copy = copytree(tiny_qwen, tmp_path, dirs_exist_ok=True)
    weights = load_file(copy / "model.safetensors")
    torch.manual_seed(0)
    weights["lm_head.weight"] = torch.randn_like(weights["model.embed_tokens.weight"])
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    reranker, passages = load_scorer(copy, LIMIT), varied_texts(9)
    ours = sigmoid(score(reranker, "search", passages))
    expected = qwen.QwenReranker(copy, LIMIT).scores("search", passages, DEFAULT_INSTRUCTION)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5)


def largest_allocation(folder: Path) -> int:
    """Return the bytes of the largest allocation in a forward of 64 pairs."""
    reranker = load_scorer(folder, 4096, "qwen3-reranker")
    ids = [pair.ids for pair in reranker.tokenize_pairs("search", corpus(64), None)]
    with torch.profiler.profile(profile_memory=True) as profile:
        reranker.forward(ids, Outputs())
    return max(event.self_cpu_memory_usage for event in profile.events())


def test_qwen3_reranker_memory_does_not_grow_with_the_vocabulary(tmp_path: Path) -> None:
    small = save_qwen(tmp_path / "small", vocabulary=1000, layers=1)
    whole = save_qwen(tmp_path / "whole", vocabulary=30_000, layers=1)
    assert largest_allocation(whole) == largest_allocation(small)


def without_a_head(folder: Path) -> None:
    """Qwen3-Embedding names the same architecture as Qwen3-Reranker."""
    Qwen3Model.from_pretrained(folder, dtype=torch.float32).save_pretrained(folder)
    change(folder / "config.json", architectures=["Qwen3ForCausalLM"])


def as_a_classifier(folder: Path) -> None:
    config = Qwen3Config.from_pretrained(folder, num_labels=1)
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    change(folder / "config.json", architectures=None)


def with_another_task(folder: Path) -> None:
    CrossEncoder(str(folder), device="cpu").save_pretrained(str(folder))
    prompts = {"prompts": {"task": "find the recipe"}, "default_prompt_name": "task"}
    change(folder / "config_sentence_transformers.json", **prompts)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: save_qwen(folder, answers=("da", "net")), "has no token yes"),
        (lambda folder: (folder / "1_Pooling").mkdir(), "an embedding model and not a reranker"),
        (
            lambda folder: change(folder / "config.json", architectures=["Qwen3ForTokenClassific"]),
            "holds a Qwen3ForTokenClassific and not a reranker: it has no classification head",
        ),
        (without_a_head, "an embedding model and not a reranker: it has no classification head"),
        (as_a_classifier, "holds a classifier by its weights, and config.json names no arch"),
    ],
)
def test_folders_without_a_qwen3_reranker_are_refused(
    spoil, message, tiny_qwen: Path, tmp_path: Path
) -> None:
    copy = copytree(tiny_qwen, tmp_path, dirs_exist_ok=True)
    spoil(copy)
    with pytest.raises(StartupError, match=message):
        load_scorer(copy, LIMIT)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without_a_head, "it has no head of a language model"),
        (with_another_task, "has the prompt 'find the recipe' for every pair"),
    ],
)
def test_kind_does_not_make_a_qwen3_reranker(
    spoil, message, tiny_qwen: Path, tmp_path: Path
) -> None:
    copy = copytree(tiny_qwen, tmp_path, dirs_exist_ok=True)
    spoil(copy)
    with pytest.raises(StartupError, match=message):
        load_scorer(copy, LIMIT, "qwen3-reranker")


def with_scores_of_sentence_transformers(folder: Path) -> None:
    CrossEncoder(str(folder), device="cpu").save_pretrained(str(folder))


def with_another_template(folder: Path) -> None:
    with_scores_of_sentence_transformers(folder)
    (folder / "chat_template.jinja").write_text(PREFIX + "{{ messages[0].content }}", "utf-8")


def with_unused_rows(folder: Path) -> None:
    save_qwen(folder, vocabulary=1000)


@pytest.mark.parametrize(
    ("change_folder", "message"),
    [
        (with_scores_of_sentence_transformers, "set its kind: qwen3-reranker, bge-reranker"),
        (with_another_template, "set its kind: qwen3-reranker, bge-reranker"),
        (with_unused_rows, "set its kind to one of qwen3-reranker, bge-reranker"),
    ],
)
def test_language_model_of_another_template_is_refused_unless_kind_names_one(
    change_folder, message: str, tiny_qwen: Path, tmp_path: Path
) -> None:
    copy = copytree(tiny_qwen, tmp_path / "Qwen3-Reranker-0.6B")
    change_folder(copy)
    with pytest.raises(StartupError, match=message):
        load_scorer(copy, LIMIT)
    with pytest.raises(StartupError, match="kind=another-kind is unknown for Qwen3-Reranker-0.6B"):
        load_scorer(copy, LIMIT, "another-kind")
    load_scorer(copy, LIMIT, "qwen3-reranker")


@pytest.mark.parametrize("answers", [("yes", "no"), (7, 9)])
def test_qwen3_reranker_of_sentence_transformers_is_known_by_its_template(
    answers: tuple, tiny_qwen: Path, tmp_path: Path
) -> None:
    copy = copytree(tiny_qwen, tmp_path / "any name")
    if answers == ("yes", "no"):
        vocabulary = Tokenizer.from_file(str(copy / "tokenizer.json"))
        answers = tuple(map(vocabulary.token_to_id, answers))
    save_scores(copy, answers, PUBLISHED)
    model = load_scorer(copy, LIMIT)
    assert isinstance(model._pairs, QwenPairs)
    for instruction in (None, "Find the recipe"):
        given = "search", varied_texts(9), instruction
        assert_close(score(model, *given), reference_scores(copy, *given))


@pytest.mark.parametrize(
    ("template", "default"),
    [(PUBLISHED.replace("<Query>", "<Question>"), None), (PUBLISHED, "find the recipe")],
)
def test_qwen3_with_other_prompts_is_read_by_its_own_template(
    template: str, default: str | None, tiny_qwen: Path, tmp_path: Path
) -> None:
    copy = copytree(tiny_qwen, tmp_path / "Qwen3-Reranker-0.6B")
    prompts = {"prompts": {"task": default or ""}, "default_prompt_name": default and "task"}
    save_scores(copy, (7, 9), template, **prompts)
    model = load_scorer(copy, LIMIT)
    assert isinstance(model._pairs, TemplatePairs)
    (scores,) = copy.glob("*LogitScore")
    change(scores / "config.json", true_token_id=None)
    with pytest.raises(StartupError, match="has no usable true_token_id: None"):
        load_scorer(copy, LIMIT)


def test_reranker_with_another_module_is_refused(tiny_qwen: Path, tmp_path: Path) -> None:
    copy = copytree(tiny_qwen, tmp_path, dirs_exist_ok=True)
    with_scores_of_sentence_transformers(copy)
    kind = "sentence_transformers.base.modules.dense.Dense"
    with changed_json(copy / "modules.json") as modules:
        modules.append(modules[-1] | {"type": kind})
    with pytest.raises(StartupError, match="names the module Dense"):
        load_scorer(copy, LIMIT, "qwen3-reranker")


PARTS = st.lists(st.sampled_from([*WORDS, *GAPS, "?", ":", "<", ">:", "1", "search"]), max_size=8)
TEXTS = PARTS.map("".join) | st.text(max_size=20)


@pytest.fixture(scope="module")
def tokenizer(tiny_qwen: Path) -> Tokenizer:
    """Return the tiny Qwen's tokenizer with the pre-tokenizer of the published model."""
    tokenizer = Tokenizer.from_file(str(tiny_qwen / "tokenizer.json"))
    tokenizer.pre_tokenizer = qwen_words()
    return tokenizer


def template_with(tokenizer: Tokenizer, room: int) -> QwenPairs:
    """Make a template whose limit leaves `room` tokens for the content."""
    whole = QwenPairs(TextTokenizer(tokenizer, 4096))
    fixed = len(whole.prefix) + len(whole.suffix)
    return QwenPairs(TextTokenizer(tokenizer, fixed + room))


def assert_as_one_text(
    template: QwenPairs, pair: TokenizedPair, tokenizer: Tokenizer, room: int, *texts: str
) -> None:
    """Compare ids and counts with those of the whole prompt, tokenized as one text."""
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
    assert pair.ids.tolist() == [*template.prefix, *whole.ids[:kept], *template.suffix]
    if pair.query.exact:
        assert pair.query.total == after_query - first_query
    else:
        assert pair.query.kept < pair.query.total
    assert pair.query.kept == max(0, min(kept, after_query) - first_query)
    if pair.passage.exact:
        assert pair.passage.total == len(whole.ids) - first_passage
    else:
        assert pair.passage.kept < pair.passage.total
    assert pair.passage.kept == max(0, kept - first_passage)


@given(st.sampled_from(["Find it", "x\n", " "]), TEXTS.filter(str.strip), TEXTS, st.integers(1, 90))
@settings(max_examples=60)
def test_qwen3_template_ids_and_counts_equal_the_whole_prompt(
    tokenizer: Tokenizer, instruction: str, query: str, passage: str, room: int
) -> None:
    template, passages = template_with(tokenizer, room), [passage, "", f" {passage}"]
    for text, pair in zip(passages, template.fill(query, passages, instruction), strict=True):
        assert_as_one_text(template, pair, tokenizer, room, instruction, query, text)


def test_line_break_joined_with_the_query_counts_as_query(
    tokenizer: Tokenizer,
) -> None:
    joining = Tokenizer.from_str(tokenizer.to_str())
    joining.add_tokens(["?\n"])
    template = template_with(joining, 4000)
    (pair,) = template.fill("search?", ["hybrid"], "Find")
    assert_as_one_text(template, pair, joining, 4000, "Find", "search?", "hybrid")
    (plain,) = template.fill("search!", ["hybrid"], "Find")
    assert len(plain.ids) == len(pair.ids) + 1


@pytest.mark.parametrize("passage", ["", " hybrid search of vectors", "x " * 30])
@pytest.mark.parametrize("most", [2, 200, None])
@pytest.mark.parametrize("side", ["left", "right"])
def test_passage_truncation_from_either_side(
    tokenizer: Tokenizer, passage: str, most: int | None, side
) -> None:
    texts = TextTokenizer(tokenizer, 4096)
    template = QwenPairs(texts)
    cut = TruncationOptions(side=side, max_tokens=most)
    (pair,) = template.fill("search", [passage], "Find", cut)
    (head,) = template.fill("search", [""], "Find", TruncationOptions(max_tokens=0))
    whole = texts.encode_plain([f" {passage}"], 4096)[0].ids.tolist()
    count = len(whole) if most is None else min(most, len(whole))
    kept = whole[:count] if side == "right" else whole[len(whole) - count :]
    before = head.ids[: len(head.ids) - len(template.suffix)].tolist()
    assert pair.ids.tolist() == [*before, *kept, *template.suffix]
    assert pair.query.kept == pair.query.total == head.query.total
    if count == len(whole):
        assert pair.passage.kept == pair.passage.total
    elif side == "left":
        assert pair.passage.kept == count
    elif pair.passage.exact:
        assert pair.passage.total - pair.passage.kept == len(whole) - count
    else:
        assert pair.passage.kept < pair.passage.total


def test_max_length_leaves_a_token_beside_the_template(tokenizer: Tokenizer) -> None:
    template = template_with(tokenizer, 1)
    fixed = len(template.prefix) + len(template.suffix)
    (pair,) = template.fill("search", ["a"], "Find")
    assert len(pair.ids) == fixed + 1
    with pytest.raises(StartupError, match=f"a length limit of {fixed} tokens leaves no room besi"):
        template_with(tokenizer, 0)
