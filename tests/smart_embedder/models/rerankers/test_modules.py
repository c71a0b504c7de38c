"""Cross-encoders of sentence-transformers' modules, such as the Ettin rerankers."""

from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder as Reference
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling
from torch import nn
from transformers import BertModel, ModernBertModel

from smart_embedder.errors import StartupError
from tests.support.checkpoints import changed_json
from tests.support.encoders import assert_close, load_scorer, reference_scores, score
from tests.support.wordpiece import MODERNBERT, change, save_model

QUERY = "hybrid search"
PASSAGES = ["vector", "memory, rank!", "", "rank " * 40, "unknown жизнь", "search " * 60]
LIMIT = 128


def save_modular(folder: Path, pooling: str, *, labels: int = 1, like_ettin: bool = True) -> Path:
    """Save a transformer with modules from its states to scores, as sentence-transformers does."""
    kind, changes = (ModernBertModel, MODERNBERT) if like_ettin else (BertModel, {})
    transformer = Transformer(str(save_model(folder / "plain", kind, **changes)))
    torch.manual_seed(7)
    steps = [
        Dense(64, 48, bias=False, activation_function=nn.GELU()),
        LayerNorm(48),
        Dense(48, labels, activation_function=nn.Identity(), module_output_name="scores"),
    ]
    model = Reference(modules=[transformer, Pooling(64, pooling), *steps], device="cpu")
    model.save_pretrained(str(folder / "modular"))
    return folder / "modular"


@pytest.fixture(scope="module")
def ettin(tmp_path_factory) -> Path:
    return save_modular(tmp_path_factory.mktemp("ettin"), "cls")


@pytest.mark.parametrize(("pooling", "like_ettin"), [("cls", True), ("mean", False)])
def test_modular_cross_encoder_scores_equal_sentence_transformers(
    pooling: str, like_ettin: bool, tmp_path: Path
) -> None:
    folder = save_modular(tmp_path, pooling, like_ettin=like_ettin)
    model = load_scorer(folder, LIMIT)
    expected = reference_scores(folder, QUERY, PASSAGES)
    assert_close(score(model, QUERY, PASSAGES), expected)
    assert np.ptp(expected) > 1e-3


def test_modular_cross_encoder_with_several_scores_needs_a_kind(tmp_path: Path) -> None:
    folder = save_modular(tmp_path, "cls", labels=2)
    with pytest.raises(StartupError, match="modular has the labels LABEL_0, LABEL_1, and "):
        load_scorer(folder, LIMIT)
    model = load_scorer(folder, LIMIT, "LABEL_1")
    logits = torch.tensor(reference_scores(folder, QUERY, PASSAGES))
    chances = torch.tensor(score(model, QUERY, PASSAGES)).sigmoid()
    torch.testing.assert_close(chances, logits.softmax(1)[:, 1], rtol=0, atol=1e-6)


def as_an_embedder(folder: Path) -> None:
    with changed_json(folder / "modules.json") as modules:
        del modules[2:]


def without_a_transformer_first(folder: Path) -> None:
    with changed_json(folder / "modules.json") as modules:
        modules[2], modules[1] = modules[1], modules[2]


def with_scores_of_another_name(folder: Path) -> None:
    change(folder / "4_Dense" / "config.json", module_output_name="sentence_embedding")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (as_an_embedder, "an embedding model and not a reranker: no module of it computes scores"),
        (without_a_transformer_first, "has its modules in the order Transformer, Dense, Pooling, "),
        (with_scores_of_another_name, "works on sentence_embedding; supported here: scores"),
    ],
)
def test_modules_that_compute_no_scores_are_refused(
    ettin: Path, spoil, message: str, tmp_path: Path
) -> None:
    folder = copytree(ettin, tmp_path / "copy")
    spoil(folder)
    with pytest.raises(StartupError, match=message):
        load_scorer(folder, LIMIT)
