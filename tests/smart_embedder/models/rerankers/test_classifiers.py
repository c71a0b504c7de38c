"""Classifiers of types without a head of ours, compared with transformers' own classes."""

from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from smart_embedder.errors import StartupError
from tests.support.checkpoints import changed_weights, spread_weights
from tests.support.encoders import load_scorer, score
from tests.support.wordpiece import change, save_wordpiece_tokenizer

LIMIT = 96
QUERY = "hybrid search"
PASSAGES = ["vector", "memory, rank!", "", "rank " * 12, "unknown жизнь", "search " * 200]
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "num_labels": 1,
}
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 16}
BART = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
    "max_position_embeddings": 128, "pad_token_id": 0, "num_labels": 1, "eos_token_id": 3,
    "bos_token_id": 2, "decoder_start_token_id": 3,
}  # fmt: skip
# The type, its sizes, and how its batches are made. Others are tried in tests/tools/matrix.
TYPES = {
    "bart": (BART, "alone"),
    "fnet": (SIZES | {"type_vocab_size": 2}, "one_length"),
    "gemma": (GROUPED, "padded"),
    "gte": (SIZES | {"type_vocab_size": 2}, "padded"),
    "mistral": (GROUPED | {"sliding_window": 32}, "padded"),
}
# Those whose tokenizers do not mark the two texts of a pair.
UNMARKED = {"bart", "gemma", "mistral"}


def save_classifier(folder: Path, model_type: str, **changes: object) -> Path:
    folder.mkdir()
    vocabulary = save_wordpiece_tokenizer(folder)
    names = ["input_ids", "attention_mask"]
    if model_type not in UNMARKED:
        names.append("token_type_ids")
    options = {"model_input_names": names, "tokenizer_class": "PreTrainedTokenizerFast"}
    change(folder / "tokenizer_config.json", **options)
    torch.manual_seed(5)
    sizes = TYPES[model_type][0] | {"vocab_size": vocabulary} | changes
    config = AutoConfig.for_model(model_type, **sizes)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    spread_weights(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("classifiers")
    return {name: save_classifier(root / name, name) for name in TYPES}


@torch.inference_mode()
def logits_of(folder: Path) -> torch.Tensor:
    """Compute the logits of each pair alone, cut as `FlagReranker` cuts it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    module = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    logits = []
    for passage in PASSAGES:
        options = {"truncation": "only_second", "max_length": LIMIT, "return_tensors": "pt"}
        logits.append(module(**tokenizer([(QUERY, passage)], **options)).logits[0])
    return torch.stack(logits)


@pytest.mark.parametrize("model_type", TYPES)
def test_classifier_logits_equal_transformers_for_each_pair_alone(folders, model_type: str) -> None:
    model = load_scorer(folders[model_type], LIMIT)
    expected = logits_of(folders[model_type])[:, 0].numpy()
    np.testing.assert_allclose(score(model, QUERY, PASSAGES), expected, rtol=0, atol=1e-5)
    assert np.ptp(expected) > 1e-3
    assert model.info.paths["batch"] == TYPES[model_type][1]


@pytest.mark.parametrize("problem", ["single_label_classification", "multi_label_classification"])
def test_score_of_a_label_is_its_log_odds_or_its_own_logit(problem: str, tmp_path: Path) -> None:
    labels = {"id2label": {0: "off", 1: "on", 2: "so so"}, "problem_type": problem}
    folder = save_classifier(tmp_path / "gte", "gte", **labels, num_labels=3)
    ours = torch.tensor(score(load_scorer(folder, LIMIT, "on"), QUERY, PASSAGES))
    logits = logits_of(folder)
    chances = logits.sigmoid() if problem.startswith("multi") else logits.softmax(1)
    torch.testing.assert_close(ours.sigmoid(), chances[:, 1], rtol=0, atol=1e-6)


def without_segments(folder: Path) -> None:
    change(folder / "config.json", type_vocab_size=1)
    with changed_weights(folder) as weights:
        name = "gte.embeddings.token_type_embeddings.weight"
        weights[name] = weights[name][:1].clone()


def without_a_head(folder: Path) -> None:
    with changed_weights(folder) as weights:
        del weights["score.weight"]


@pytest.mark.parametrize(
    ("model_type", "spoil", "message"),
    [
        ("gte", without_segments, "cannot compute every text alone in its batch: index out of"),
        ("gemma", without_a_head, "lacks the tensor score.weight"),
        (
            "bart",
            lambda folder: change(folder / "config.json", eos_token_id=4000),
            "reads the state of the token eos_token_id, which the tokenizer does not add: Each",
        ),
        (
            "gemma",
            lambda folder: change(folder / "config.json", architectures=["GemmaModel"]),
            "an embedding model and not a reranker: it has no classification head",
        ),
    ],
)
def test_classifier_that_is_not_whole_is_refused(
    folders, model_type, spoil, message, tmp_path: Path
) -> None:
    folder = copytree(folders[model_type], tmp_path / "copy")
    spoil(folder)
    with pytest.raises(StartupError, match=message):
        load_scorer(folder, LIMIT)
