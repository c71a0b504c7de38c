"""Cross-encoders, compared with FlagEmbedding and sentence-transformers; refused models."""

from pathlib import Path
from shutil import copytree

import pytest
import torch
import transformers
from sentence_transformers import CrossEncoder as Reference
from transformers import BertForSequenceClassification

from smart_embedder.errors import StartupError
from smart_embedder.models.rerankers.reranker import Reranker
from smart_embedder.requests import Outputs
from tests.support.checkpoints import (
    changed_json,
    changed_weights,
    save_byte_level_tokenizer,
)
from tests.support.encoders import assert_close, load_scorer, reference_scores, score
from tests.support.texts import ODD_TEXTS
from tests.support.wordpiece import (
    MODERNBERT,
    ROBERTA,
    change,
    keep_capital_letters,
    save_model,
)

BGE_LIMIT = 64


@pytest.fixture(scope="module")
def ours(tiny_reranker: Path) -> Reranker:
    return load_scorer(tiny_reranker, BGE_LIMIT)


def test_pair_token_ids_have_the_layout_of_the_model(ours) -> None:
    plain = lambda texts: [text.ids for text in ours._tokenizer.encode_plain(texts, 1000)]  # noqa: E731
    for query in ("hybrid search", *ODD_TEXTS):
        (query_ids,) = plain([query])
        for text, pair in zip(ODD_TEXTS, ours.tokenize_pairs(query, ODD_TEXTS, None), strict=True):
            head = [0, *query_ids[:48].tolist()]
            (passage,) = plain([text])
            if not len(passage):
                assert pair.ids.tolist() == [*head, 2]
                continue
            kept = passage[: BGE_LIMIT - 3 - len(head)].tolist()
            assert pair.ids.tolist() == [*head, 2, 2, *kept, 2]


@pytest.mark.parametrize(
    ("query", "query_kept", "passage", "passage_kept"),
    [
        *((words, min(words, 48), 1, 1) for words in (48, 49)),
        *((2, 2, words, min(words, 58)) for words in (58, 59)),
    ],
)
def test_query_truncation_to_three_quarters_of_the_limit(
    ours: Reranker, query, query_kept, passage, passage_kept
) -> None:
    (pair,) = ours.tokenize_pairs("search " * query, ["vector " * passage], None)
    assert (pair.query.total, pair.query.kept) == (query, query_kept)
    assert (pair.passage.total, pair.passage.kept) == (passage, passage_kept)
    assert len(pair.ids) == query_kept + passage_kept + 4 <= BGE_LIMIT


LIMIT = 128
GROUPED = {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
QUERY = "hybrid search"
PASSAGES = [
    *["vector", "memory, rank!", "[SEP] query [MASK]", "rank " * 40, "unknown жизнь", "  "],
    *["search " * length for length in (3, 17, 64)],
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_reranker: Path) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("classifiers")
    like_bge = {"tokenizer_of": tiny_reranker, **ROBERTA}
    nli = {"id2label": {0: "contradiction", 1: "Entailment", 2: "neutral"}}
    four = {"id2label": {0: "off", 1: "partly", 2: "relevant", 3: "exact"}}
    mean = {"classifier_pooling": "mean", "classifier_activation": "silu"}

    def save(kind: str, **changes: object) -> Path:
        model = getattr(transformers, f"{kind}ForSequenceClassification")
        return save_model(root / str(len(saved)), model, **changes)

    saved: dict[str, Path] = {}
    saved["bert"] = save("Bert", num_labels=1)
    saved["bert, three labels"] = save("Bert", **nli)
    saved["bert, without segments"] = save("Bert", num_labels=1)
    # The tokenizer does not mark the texts of a pair.
    tokenizer = saved["bert, without segments"] / "tokenizer_config.json"
    change(tokenizer, model_input_names=["input_ids", "attention_mask"])
    saved["xlm-roberta, four labels"] = save("XLMRoberta", **four, **like_bge)
    saved["modernbert"] = save("ModernBert", num_labels=1, **MODERNBERT)
    saved["modernbert, the mean"] = save("ModernBert", **nli, **mean, **MODERNBERT)
    saved["distilbert"] = save("DistilBert", num_labels=2)
    saved["qwen3"] = save("Qwen3", num_labels=1, **GROUPED)
    # Qwen's tokenizer ends texts with its padding token.
    name = "qwen3, texts that end in padding"
    saved[name] = save("Qwen3", num_labels=2, vocab_size=800, **GROUPED)
    save_byte_level_tokenizer(saved[name], ("yes", "no"), template_adds_end=True)
    return saved


# The label that means relevant, and its index, for models with several labels.
RANKING = {
    "bert, three labels": ("Entailment", 1),
    "xlm-roberta, four labels": ("relevant", 2),
    "modernbert, the mean": ("Entailment", 1),
    "distilbert": ("LABEL_1", 1),
    "qwen3, texts that end in padding": ("LABEL_1", 1),
}
FAMILIES = ["bert, three labels", "xlm-roberta, four labels", "modernbert", "modernbert, the mean"]
FAMILIES += ["distilbert", "bert, without segments", "qwen3", "qwen3, texts that end in padding"]


@pytest.mark.parametrize("family", FAMILIES)
def test_cross_encoder_scores_equal_sentence_transformers(folders, family) -> None:
    kind, ranking = RANKING.get(family, (None, 0))
    ours = load_scorer(folders[family], LIMIT, kind)
    scores = score(ours, QUERY, PASSAGES)
    expected = reference_scores(folders[family], QUERY, PASSAGES)
    if len(ours.labels) == 1:
        assert_close(scores, expected)
    else:
        chances = torch.tensor(expected).softmax(dim=1)[:, ranking]
        torch.testing.assert_close(torch.tensor(scores).sigmoid(), chances, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "kind", "message"),
    [
        ("bert, three labels", None, "labels contradiction, Entailment, neutral, and nothing says"),
        ("bert, three labels", "entailment", "kind=entailment is no label of 1: it has contradict"),
        ("bert", "entailment", "kind=entailment is no label of 0: it has LABEL_0"),
    ],
)
def test_kind_must_name_one_of_several_labels(folders, family, kind, message) -> None:
    with pytest.raises(StartupError, match=message):
        load_scorer(folders[family], LIMIT, kind)


def test_cross_encoder_truncation_and_lower_case_follow_the_configuration(tmp_path: Path) -> None:
    folder = save_model(tmp_path, BertForSequenceClassification, num_labels=1)
    keep_capital_letters(folder)
    plain = Reference(str(folder), device="cpu")
    plain.save_pretrained(str(folder))
    change(folder / "tokenizer_config.json", model_max_length=40)
    change(folder / "sentence_bert_config.json", do_lower_case=True)
    ours = load_scorer(folder, LIMIT)
    assert ours.max_length == 40
    passages = [*PASSAGES, "Memory, RANK!"]
    assert_close(score(ours, QUERY, passages), reference_scores(folder, QUERY, passages))


def test_pair_without_a_token_is_scored(folders) -> None:
    folder = folders["qwen3, texts that end in padding"]
    model = load_scorer(folder, LIMIT, "LABEL_1")
    (pair,) = model.tokenize_pairs("", [""], None)
    assert pair.ids.tolist() == [0]
    assert len(model.forward([pair.ids], Outputs())) == 1


CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}: {{ message.content | trim }}"
    "{% endfor %}<|im_end|>"
)


@pytest.mark.parametrize("is_saved", [False, True])
def test_classifier_with_a_chat_template_equals_sentence_transformers(
    is_saved: bool, folders, tmp_path: Path
) -> None:
    folder = copytree(folders["qwen3"], tmp_path / "copy")
    (folder / "chat_template.jinja").write_text(CHAT)
    if is_saved:
        Reference(str(folder), device="cpu").save_pretrained(str(folder))
    model = load_scorer(folder, LIMIT)
    for instruction in (None, "Find it"):
        given = "hybrid search? ", ["vector", " memory.\n", "", "unknown жизнь!"], instruction
        assert_close(score(model, *given), reference_scores(folder, *given))


def without_a_head(folder: Path) -> None:
    with changed_weights(folder) as weights:
        del weights["score.weight"]


def with_a_module(folder: Path) -> None:
    Reference(str(folder), device="cpu").save_pretrained(str(folder))
    kind = "sentence_transformers.base.modules.dense.Dense"
    with changed_json(folder / "modules.json") as modules:
        modules.append({"idx": 1, "name": "1", "path": "1_Dense", "type": kind})


def with_a_prompt(folder: Path) -> None:
    prompts = {"prompts": {"query": "search "}, "default_prompt_name": "query"}
    Reference(str(folder), device="cpu", **prompts).save_pretrained(str(folder))


@pytest.mark.parametrize(
    ("family", "spoil", "message"),
    [
        ("modernbert", {"classifier_activation": "glow"}, "_activation glow, which transformers"),
        # transformers refuses it.
        ("modernbert", {"classifier_pooling": "max"}, "'classifier_pooling' expected one of"),
        (
            "bert",
            {"model_type": "bert-generation"},
            "type bert-generation, and transformers .* has no classifier of this type",
        ),
        (
            "qwen3",
            lambda f: (f / "chat_template.jinja").touch(),
            "does not repeat the text of each",
        ),
        ("qwen3", without_a_head, "an embedding model and not a reranker: it has no classifi"),
        ("bert", with_a_module, "names the module Dense"),
        ("bert", with_a_prompt, "has the prompt 'search ' for every pair"),
    ],
)
def test_unsupported_cross_encoders_are_refused(
    folders, family, spoil, message, tmp_path: Path
) -> None:
    folder = copytree(folders[family], tmp_path / "copy")
    if callable(spoil):
        spoil(folder)
    else:
        change(folder / "config.json", **spoil)
    with pytest.raises(StartupError, match=message):
        load_scorer(folder, LIMIT)
