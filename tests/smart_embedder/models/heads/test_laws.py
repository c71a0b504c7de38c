"""A law for every model: a number that is not finite fails only its own text."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertForSequenceClassification, BertModel, XLMRobertaForMaskedLM

from smart_embedder.errors import InferenceError
from smart_embedder.models.loader import load_embedder
from smart_embedder.requests import Outputs
from smart_embedder.results import TextEmbedding
from smart_embedder.tokens import TokenIds
from tests.support.checkpoints import changed_weights
from tests.support.encoders import float32, load_scorer, save_family, word_tokenizer
from tests.support.wordpiece import ROBERTA, save_colbert, save_model, save_splade

KINDS = ("dense", "sparse", "colbert")
LABELS = {"id2label": {0: "contradiction", 1: "entailment", 2: "neutral"}}
# A fixture, or a function that saves a checkpoint in a folder, given the folder of a tokenizer.
MODELS: dict[str, str | Callable[[Path, Path], Path]] = {
    "bge-m3": "tiny_m3",
    "dense": lambda folder, _: save_family(folder, "bert", word_tokenizer()),
    "dense, packed": lambda folder, _: save_family(folder, "modernbert", word_tokenizer()),
    # The decoder has weights of its own, which are not poisoned with the embeddings.
    "splade": lambda folder, like: save_splade(
        folder, XLMRobertaForMaskedLM, tie_word_embeddings=False, tokenizer_of=like, **ROBERTA
    ),
    "colbert": lambda folder, _: save_colbert(folder, BertModel),
    "cross-encoder": lambda folder, _: save_model(folder, BertForSequenceClassification, **LABELS),
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tiny_reranker: Path, tmp_path_factory) -> Path:
    save = MODELS[request.param]
    if isinstance(save, str):
        return request.getfixturevalue(save)
    return save(tmp_path_factory.mktemp("laws") / request.param.partition(",")[0], tiny_reranker)


def load(folder: Path) -> Any:
    if "SequenceClassification" in (folder / "config.json").read_text():
        return load_scorer(folder, 512, "entailment")
    return load_embedder("m", folder, 512, float32())


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load(folder)


def ids_of(model: Any, texts: list[str]) -> list[TokenIds]:
    if hasattr(model, "kinds"):
        return [text.ids for text in model.tokenize(texts)]
    return [pair.ids for pair in model.tokenize_pairs("search", texts, None)]


def arrays(result: Any) -> dict[str, np.ndarray]:
    if not isinstance(result, TextEmbedding):
        return {"score": np.asarray(result)}
    found = {kind: getattr(result, kind) for kind in ("dense", "colbert")}
    if result.sparse is not None:
        found["sparse"] = np.zeros(4096, np.float32)
        found["sparse"][result.sparse.indices] = result.sparse.values
    return {kind: array for kind, array in found.items() if array is not None}


def assert_same(actual: Any, expected: Any) -> None:
    found, known = arrays(actual), arrays(expected)
    assert found.keys() == known.keys()
    for kind, array in found.items():
        np.testing.assert_allclose(array, known[kind], rtol=0, atol=1e-5)


def test_nan_fails_only_its_own_text(folder: Path, model: Any, tmp_path: Path) -> None:
    """The embedding of a token of `music` is NaN."""
    texts = ["hybrid search", "music", "search", "vector search history " * 30, "search music"]
    ids = ids_of(model, texts)
    copy = shutil.copytree(folder, tmp_path / "poisoned")
    tables = ("word_embeddings.weight", "tok_embeddings.weight", "shared.weight")
    # The last such token: the trial of a packed path at startup draws ids below 100.
    first, music, _, longest, _ = (
        {*tokens.ids.tolist()} for tokens in model._tokenizer.encode_plain(texts, 200)
    )
    with changed_weights(copy) as weights:
        (name,) = [name for name in weights if name.endswith(tables)]
        weights[name][max(music - first - longest)] = torch.nan
    poisoned = load(copy)
    requests = [Outputs()]
    if (kinds := getattr(model, "kinds", None)) is not None:
        requests = [kinds, *(Outputs(**{kind: True}) for kind in KINDS if getattr(kinds, kind))]
    for outputs in requests:
        results = poisoned.forward(ids, outputs)
        for text, sequence, result in zip(texts, ids, results, strict=True):
            if "music" in text:
                assert isinstance(result, InferenceError)
            else:
                assert_same(result, model.forward([sequence], outputs)[0])
