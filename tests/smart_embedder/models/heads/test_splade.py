"""SPLADE's weights against sentence-transformers' SparseEncoder on the same files."""

import json
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules.router import Router
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding
from transformers import (
    BertForMaskedLM,
    BertModel,
    DistilBertForMaskedLM,
    ModernBertForMaskedLM,
    MPNetForMaskedLM,
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


FAMILIES = (
    "bert",
    "xlm-roberta",
    "modernbert",
    "modernbert, without a bias",
    "distilbert",
    "mpnet",
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_reranker: Path) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("splade")
    untied = {"tokenizer_of": tiny_reranker, "tie_word_embeddings": False}
    models = (
        (BertForMaskedLM, {"hidden_act": "relu"}),
        (XLMRobertaForMaskedLM, ROBERTA | untied),
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
    results = model.forward([text.ids for text in model.tokenize(texts)], SPARSE)
    return np.stack([as_row(result, model) for result in results])


def as_row(result: TextEmbedding, model: SpladeEmbedder) -> np.ndarray:
    indices, values = result.sparse.indices, result.sparse.values
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
def test_splade_weights_equal_sentence_transformers(folders, load, family) -> None:
    actual = weights_of(load(folders[family]), TEXTS)
    expected = reference(folders[family], TEXTS)
    assert ((actual > 0).sum(1) > 5).all()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("pooling", "activation"), [("max", "log1p_relu"), ("sum", "relu")])
def test_splade_poolings_and_activations_equal_sentence_transformers(
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
    ("texts", "requested", "most", "expected"),
    [
        (["sea"] * 4, "yyyy", 12, [12]),  # A text has three tokens.
        (["sea"] * 4, "yyyy", 8, [6, 6]),
        (["sea"] * 3, "yny", 100, [3, 3]),  # The text between them is not computed.
        (["sea sea sea sea", "sea"], "yy", 5, [3, 5, 1]),
        (["sea"], "y", 0, [1, 1, 1]),
    ],
)
def test_splade_logits_are_computed_in_bounded_slices(
    bert: SpladeEmbedder, monkeypatch, texts, requested, most, expected
) -> None:
    head, rows = bert._head, []

    def watched_head(states: torch.Tensor) -> torch.Tensor:
        rows.append(len(states))
        return head(states)

    monkeypatch.setattr(splade, "_MOST_LOGITS", (most + 1) * bert._vocabulary - 1)
    monkeypatch.setattr(bert, "_head", watched_head)
    outputs = [SPARSE if letter == "y" else Outputs() for letter in requested]
    bert.launch([text.ids for text in bert.tokenize(texts)], outputs)()
    assert sorted(rows, reverse=True) == sorted(expected, reverse=True)


def test_splade_prompts_and_default_prompt_are_read(folders, load, tmp_path: Path) -> None:
    folder = copy_with_pooling(folders["bert"], tmp_path)
    prompts = {"query": "Query ", "doc": "rank sea "}
    change(folder / "config_sentence_transformers.json", prompts=prompts, default_prompt_name="doc")
    model, theirs = load(folder), SparseEncoder(str(folder), device="cpu")
    assert (dict(model.prompts), model.default_prompt) == (prompts, prompts["doc"])
    for name, prompt in prompts.items():
        ids = [text.ids for text in model.tokenize(TEXTS, prompt)]
        actual = [as_row(result, model) for result in model.forward(ids, SPARSE)]
        expected = theirs.encode(TEXTS, prompt_name=name).to_dense().numpy()
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


def test_splade_max_seq_length_and_do_lower_case_are_followed(
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


@pytest.mark.parametrize("most", [7, 10_000])
def test_splade_max_active_dims_limits_the_weights(
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
        (("Router",), "has no types and structure of routes"),
        (("SparseAutoEncoder",), "names the module SparseAutoEncoder"),
        (("SparseStaticEmbedding",), "names the module SparseStaticEmbedding"),
        (
            lambda folder: copy_with_pooling(folder, folder, pooling_strategy="mean"),
            "the pooling mean of relu; supported: max and sum",
        ),
        (
            lambda folder: copy_with_pooling(folder, folder, activation_function=["relu"]),
            r"the pooling max of \['relu'\]; supported",
        ),
        (lambda folder: save_model(folder, BertModel), "lacks the head of a masked language model"),
        (
            lambda folder: change(folder / "config.json", tie_word_embeddings=False),
            "lacks the tensor cls.predictions.decoder.weight",
        ),
    ],
)
def test_unsupported_splade_models_are_refused(
    folders, load, tmp_path: Path, spoil, message: str
) -> None:
    folder = copy_with_pooling(folders["bert"], tmp_path)
    if callable(spoil):
        spoil(folder)
    else:
        name_modules(folder, *spoil)
    with pytest.raises(StartupError, match=message):
        load(folder)


@pytest.fixture(scope="module")
def routed(folders, tmp_path_factory) -> Path:
    """A model whose queries are weighed by a table, and documents by `SpladePooling`."""
    document = list(SparseEncoder(str(folders["bert"]), device="cpu").children())
    tokenizer = document[0].tokenizer
    weights = torch.rand(len(tokenizer.get_vocab()))
    weights[::7] = 0
    router = Router.for_query_document([SparseStaticEmbedding(tokenizer, weights)], document)
    folder = tmp_path_factory.mktemp("routed") / "model"
    SparseEncoder(modules=[router], device="cpu").save(str(folder))
    return folder


@pytest.mark.parametrize("most", [None, 3])
def test_queries_of_a_router_are_weighed_without_a_forward(
    routed: Path, load, tmp_path: Path, monkeypatch, most: int | None
) -> None:
    folder = copytree(routed, tmp_path / "copy")
    change(folder / "config_sentence_transformers.json", max_active_dims=most)
    model, theirs = load(folder), SparseEncoder(str(folder), device="cpu")
    assert model.reads_input_type
    documents = [text.ids for text in model.tokenize(TEXTS)]
    queries = [text.ids for text in model.tokenize(TEXTS, input_type="query")]
    both = [as_row(result, model) for result in model.forward([*documents, *queries], SPARSE)]
    expected = [theirs.encode_document(TEXTS), theirs.encode_query(TEXTS)]
    np.testing.assert_allclose(both, torch.cat([rows.to_dense() for rows in expected]), atol=1e-5)
    monkeypatch.delattr(type(model._backbone), "forward")
    found = [as_row(result, model) for result in model.forward(queries, SPARSE)]
    np.testing.assert_array_equal(found, both[len(TEXTS) :])


def test_weights_of_queries_are_part_of_the_vector_space(routed: Path, load, tmp_path) -> None:
    folder = copytree(routed, tmp_path / "copy")
    before = load(folder).spaces
    path = folder / "query_0_SparseStaticEmbedding" / "model.safetensors"
    save_file({"weight": load_file(path)["weight"] * 2}, path)
    assert load(folder).spaces != before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"structure": {"query": ["document_0_Transformer"]}}, "routes texts by their task"),
        ({"parameters": {"default_route": "query"}}, "routes texts by their task"),
        ({"parameters": {"route_mappings": {"a": "query"}}}, "routes texts by their task"),
        ({"types": {"query_0_SparseStaticEmbedding": "own.Static"}}, "code of a checkpoint"),
        ({"types": None}, "has no types and structure"),
        ({"structure": {"query": [{}]}}, "has no types and structure"),
    ],
)
def test_unsupported_routes_are_refused(routed: Path, load, tmp_path, changes, message) -> None:
    folder = copytree(routed, tmp_path / "copy")
    change(folder / "router_config.json", **changes)
    with pytest.raises(StartupError, match=message):
        load(folder)


def test_query_weights_that_do_not_fit_are_refused(routed: Path, load, tmp_path) -> None:
    folder = copytree(routed, tmp_path / "copy")
    queries = folder / "query_0_SparseStaticEmbedding"
    save_file({"weight": torch.ones(3)}, queries / "model.safetensors")
    with pytest.raises(StartupError, match="and there are weights for 3: they are not of one"):
        load(folder)
    (queries / "config.json").write_text(json.dumps({"path": "idf.json"}))
    with pytest.raises(StartupError, match="reads the weights of queries from a JSON file"):
        load(folder)
