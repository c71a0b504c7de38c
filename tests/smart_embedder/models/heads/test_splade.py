"""SPLADE's weights against sentence-transformers' SparseEncoder on the same files."""

import json
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch
from sentence_transformers import SparseEncoder
from transformers import (
    BertForMaskedLM,
    BertModel,
    DistilBertForMaskedLM,
    ModernBertForMaskedLM,
    MPNetForMaskedLM,
    RobertaForMaskedLM,
    XLMRobertaForMaskedLM,
)

from smart_embedder.errors import StartupError
from smart_embedder.models.heads import splade
from smart_embedder.models.heads.splade import SpladeEmbedder
from smart_embedder.requests import Outputs
from smart_embedder.results import TextEmbedding
from tests.support.wordpiece import (
    MODERNBERT,
    MPNET,
    ROBERTA,
    change,
    keep_capital_letters,
    save_model,
    save_splade,
)

TEXTS = [
    *["vector", "memory, rank!", "[SEP] query [MASK]", "", "unknown жизнь", "rank " * 300],
    *["search sea " * length for length in (1, 5, 9, 30)],
]
SPARSE, BOTH = Outputs(sparse=True), Outputs(dense=True, sparse=True)


FAMILIES = ("bert", "roberta", "xlm-roberta", "modernbert", "modernbert, without a bias")
FAMILIES += ("distilbert", "mpnet")


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_reranker: Path) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("splade")
    like_bge = {"tokenizer_of": tiny_reranker, **ROBERTA}
    models = (
        (BertForMaskedLM, {"hidden_act": "relu"}),
        (RobertaForMaskedLM, like_bge),
        (XLMRobertaForMaskedLM, like_bge | {"tie_word_embeddings": False}),
        (ModernBertForMaskedLM, MODERNBERT),
        (ModernBertForMaskedLM, MODERNBERT | {"decoder_bias": False}),
        (DistilBertForMaskedLM, {}),
        (MPNetForMaskedLM, MPNET),
    )
    return {
        family: save_splade(root / family, model, **changes)
        for family, (model, changes) in zip(FAMILIES, models, strict=True)
    }


@pytest.fixture(scope="module")
def bert(folders, load) -> SpladeEmbedder:
    return load(folders["bert"])


def weights_of(model: SpladeEmbedder, texts: list[str]) -> np.ndarray:
    results = model.forward([each.ids for each in model.tokenize(texts)], SPARSE)
    return np.stack([as_row(each, model) for each in results])


def as_row(made: TextEmbedding, model: SpladeEmbedder) -> np.ndarray:
    indices, values = made.sparse.indices, made.sparse.values
    assert (values > 0).all()
    assert (np.diff(indices) > 0).all()
    assert values.dtype == np.float32
    row = np.zeros(model._vocabulary, np.float32)
    row[indices] = values
    return row


def reference(folder: Path, texts: list[str]) -> np.ndarray:
    return SparseEncoder(str(folder), device="cpu").encode(texts).to_dense().numpy()


@pytest.fixture(params=[2**24, 3000], ids=["one slice", "small slices"])
def slices(request, monkeypatch) -> None:
    monkeypatch.setattr(splade, "_MOST_LOGITS", request.param)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_sentence_transformers(folders, load, family) -> None:
    actual = weights_of(load(folders[family]), TEXTS)
    expected = reference(folders[family], TEXTS)
    assert ((actual > 0).sum(1) > 5).all()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("pooling", ["max", "sum"])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_every_pooling_and_activation_is_computed(
    folders, load, tmp_path, pooling, activation, slices
) -> None:
    folder = copy_with_pooling(
        folders["bert"], tmp_path, pooling_strategy=pooling, activation_function=activation
    )
    # A sum over a hundred tokens is a hundred times as large.
    np.testing.assert_allclose(
        weights_of(load(folder), TEXTS), reference(folder, TEXTS), rtol=1e-5, atol=1e-5
    )


def copy_with_pooling(source: Path, target: Path, **pooling: str) -> Path:
    if source != target:
        copytree(source, target, dirs_exist_ok=True)
    (target / "1_SpladePooling" / "config.json").write_text(json.dumps(pooling))
    return target


@pytest.mark.parametrize(
    ("texts", "wanted", "most", "expected"),
    [
        (["sea"] * 4, "yyyy", 12, [12]),  # Of three tokens each.
        (["sea"] * 4, "yyyy", 8, [6, 6]),
        (["sea"] * 4, "yyyy", 5, [3] * 4),
        (["sea"] * 4, "yyyn", 100, [9]),
        (["sea"] * 3, "yny", 100, [3, 3]),  # Not what nobody wants between them.
        (["sea sea sea sea"], "y", 4, [4, 2]),
        (["sea sea sea sea", "sea"], "yy", 5, [3, 5, 1]),
        (["sea"], "y", 0, [1, 1, 1]),
    ],
)
def test_sequences_share_slices_of_logits_and_none_is_larger_than_it_may_be(
    bert: SpladeEmbedder, monkeypatch, texts, wanted, most, expected
) -> None:
    head, rows = bert._head, []

    def watched_head(states: torch.Tensor) -> torch.Tensor:
        rows.append(len(states))
        return head(states)

    monkeypatch.setattr(splade, "_MOST_LOGITS", (most + 1) * bert._vocabulary - 1)
    monkeypatch.setattr(bert, "_head", watched_head)
    outputs = [SPARSE if each == "y" else Outputs() for each in wanted]
    bert.launch([each.ids for each in bert.tokenize(texts)], outputs)()
    assert sorted(rows, reverse=True) == sorted(expected, reverse=True)


def test_a_prompt_is_read_before_a_text_and_one_is_the_default(
    folders, load, tmp_path: Path
) -> None:
    folder = copy_with_pooling(folders["bert"], tmp_path)
    prompts = {"query": "Query ", "doc": "rank sea "}
    change(folder / "config_sentence_transformers.json", prompts=prompts, default_prompt_name="doc")
    model, theirs = load(folder), SparseEncoder(str(folder), device="cpu")
    assert (dict(model.prompts), model.default_prompt) == (prompts, prompts["doc"])
    for name, prompt in prompts.items():
        ids = [each.ids for each in model.tokenize(TEXTS, prompt)]
        actual = [as_row(each, model) for each in model.forward(ids, SPARSE)]
        expected = theirs.encode(TEXTS, prompt_name=name).to_dense().numpy()
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


def test_texts_are_cut_and_made_small_as_the_configuration_says(
    folders, load, tmp_path: Path
) -> None:
    folder = copy_with_pooling(folders["bert"], tmp_path)
    keep_capital_letters(folder)
    texts = [*TEXTS, "Hybrid SEARCH", "the Sea"]
    uncut = weights_of(load(folder), texts)
    change(folder / "sentence_bert_config.json", max_seq_length=9, do_lower_case=True)
    model = load(folder)
    assert model.max_length == 9
    assert model.tokenize(["rank " * 300])[0].truncated
    actual = weights_of(model, texts)
    assert np.abs(actual - uncut).max() > 0.1
    np.testing.assert_allclose(actual, reference(folder, texts), rtol=0, atol=1e-5)


def test_only_a_family_whose_decoder_may_have_no_bias_is_read_without(
    folders, load, tmp_path: Path
) -> None:
    folder = copytree(folders["bert"], tmp_path / "copy")
    change(folder / "config.json", decoder_bias=False)
    expected = reference(folder, TEXTS)
    np.testing.assert_allclose(weights_of(load(folder), TEXTS), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("most", [7, 10_000])
def test_no_more_weights_are_kept_than_the_configuration_says(
    folders, load, tmp_path: Path, most, slices
) -> None:
    folder = copy_with_pooling(folders["bert"], tmp_path)
    change(folder / "config_sentence_transformers.json", max_active_dims=most)
    actual = weights_of(load(folder), TEXTS)
    assert ((actual > 0).sum(1) <= most).all()
    np.testing.assert_allclose(actual, reference(folder, TEXTS), rtol=0, atol=1e-5)


def name_modules(folder: Path, *kinds: str) -> None:
    entries = [{"type": f"sentence_transformers.modules.{kind}", "path": ""} for kind in kinds]
    (folder / "modules.json").write_text(json.dumps(entries))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (("MLMTransformer", "SpladePooling", "Normalize"), "names the module Normalize"),
        (("Router",), "by Router, which is not supported"),
        (("SparseAutoEncoder",), "by SparseAutoEncoder, which is not supported"),
        (
            lambda folder: copy_with_pooling(folder, folder, pooling_strategy="mean"),
            "the pooling mean of relu; supported: max and sum",
        ),
        (lambda folder: save_model(folder, BertModel), "lacks the head of a masked language model"),
        (
            lambda folder: change(folder / "config.json", tie_word_embeddings=False),
            "lacks the tensor cls.predictions.decoder.weight",
        ),
    ],
)
def test_what_is_not_computed_is_named(folders, load, tmp_path: Path, spoil, message: str) -> None:
    folder = copy_with_pooling(folders["bert"], tmp_path)
    if callable(spoil):
        spoil(folder)
    else:
        name_modules(folder, *spoil)
    with pytest.raises(StartupError, match=message):
        load(folder)
