"""What holds for every model, whatever it is compared with.

Neighbours change nothing, a text gets what it asks for and nothing else, and a number that is not
finite costs its own text alone.
"""

import random
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertForSequenceClassification, BertModel, XLMRobertaForMaskedLM

from smart_embedder.errors import InferenceError
from smart_embedder.kernels.target import Target
from smart_embedder.models.loader import load_embedder, load_reranker
from smart_embedder.requests import Outputs
from smart_embedder.results import TextEmbedding
from smart_embedder.tokens import TokenIds
from tests.support.checkpoints import changed_weights
from tests.support.encoders import save_family, word_tokenizer
from tests.support.texts import varied_texts
from tests.support.wordpiece import ROBERTA, save_colbert, save_model, save_splade

KINDS = ("dense", "sparse", "colbert")
LABELS = {"id2label": {0: "contradiction", 1: "entailment", 2: "neutral"}}
# How the checkpoint of each is made in a folder, with the folder of a tokenizer; or a fixture.
MODELS: dict[str, str | Callable[[Path, Path], Path]] = {
    "bge-m3": "tiny_m3",
    "dense": lambda folder, _: save_family(folder, "bert", word_tokenizer()),
    "dense, packed": lambda folder, _: save_family(folder, "modernbert", word_tokenizer()),
    "dense, padded": lambda folder, _: save_family(folder, "t5", word_tokenizer()),
    # With weights of its own behind the states, of which the poisoned one is none.
    "splade": lambda folder, like: save_splade(
        folder, XLMRobertaForMaskedLM, tie_word_embeddings=False, tokenizer_of=like, **ROBERTA
    ),
    "colbert": lambda folder, _: save_colbert(folder, BertModel),
    "cross-encoder": lambda folder, _: save_model(folder, BertForSequenceClassification, **LABELS),
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tiny_reranker: Path, tmp_path_factory) -> Path:
    made = MODELS[request.param]
    if isinstance(made, str):
        return request.getfixturevalue(made)
    return made(tmp_path_factory.mktemp("laws") / request.param.partition(",")[0], tiny_reranker)


def load(folder: Path, target: Target) -> Any:
    if "SequenceClassification" in (folder / "config.json").read_text():
        return load_reranker("m", folder, 512, target, max_qwen_pairs=16)
    return load_embedder("m", folder, 512, target)


@pytest.fixture(scope="module")
def model(folder: Path, float32_target: Target) -> Any:
    return load(folder, float32_target)


def ids_of(model: Any, texts: list[str]) -> list[TokenIds]:
    if hasattr(model, "kinds"):
        return [each.ids for each in model.tokenize(texts)]
    return [pair.ids for pair in model.tokenize_pairs("search", texts, None)]


def wishes(model: Any) -> list[Outputs]:
    """Whatever may be asked of it; who makes no dense vectors may be asked for none of its own."""
    if not hasattr(model, "kinds"):
        return [Outputs()]
    made = [kind for kind in KINDS if getattr(model.kinds, kind)]
    chosen = product((True, False), repeat=len(made))
    found = [Outputs(**dict(zip(made, each, strict=True))) for each in chosen]
    return [each for each in found if each or "dense" not in made]


def arrays(result: Any) -> dict[str, np.ndarray]:
    if not isinstance(result, TextEmbedding):
        return {"score": np.asarray(result)}
    found = {kind: getattr(result, kind) for kind in ("dense", "colbert")}
    if result.sparse is not None:
        found["sparse"] = np.zeros(4096, np.float32)
        found["sparse"][result.sparse.indices] = result.sparse.values
    return {kind: each for kind, each in found.items() if each is not None}


def assert_same(one: Any, other: Any) -> None:
    left, right = arrays(one), arrays(other)
    assert left.keys() == right.keys()
    for kind, each in left.items():
        np.testing.assert_allclose(each, right[kind], rtol=0, atol=1e-5)


def test_neighbours_change_nothing_and_each_text_gets_what_it_asks_for(model: Any) -> None:
    ids, kinds = ids_of(model, varied_texts(60)), wishes(model)
    wanted = [kinds[place % len(kinds)] for place in range(len(ids))]
    order = random.Random(1).sample(range(len(ids)), len(ids))
    results = model.launch([ids[place] for place in order], [wanted[place] for place in order])()
    for place, result in zip(order, results, strict=True):
        (alone,) = model.forward([ids[place]], wanted[place])
        assert_same(result, alone)
        if isinstance(result, TextEmbedding):
            assert {*arrays(result)} == {kind for kind in KINDS if getattr(wanted[place], kind)}
        else:
            assert np.shape(result) == ()


def test_a_number_that_is_not_finite_costs_no_other_text_anything(
    folder: Path, model: Any, float32_target: Target, tmp_path: Path
) -> None:
    """The embedding of a token of `music` is no number."""
    texts = ["hybrid search", "music", "search", "vector search history " * 30, "search music"]
    ids = ids_of(model, texts)
    copy = shutil.copytree(folder, tmp_path / "poisoned")
    tables = ("word_embeddings.weight", "tok_embeddings.weight", "shared.weight")
    # The last one, as the trial of a packed path at the start draws from those below 100.
    first, own, _, longest, _ = (
        {*each.ids.tolist()} for each in model._tokenizer.encode_plain(texts, 200)
    )
    with changed_weights(copy) as weights:
        (name,) = [each for each in weights if each.endswith(tables)]
        weights[name][max(own - first - longest)] = torch.nan
    poisoned = load(copy, float32_target)
    for wanted in wishes(model):
        if not wanted and hasattr(model, "kinds"):
            continue
        for text, own, result in zip(texts, ids, poisoned.forward(ids, wanted), strict=True):
            if "music" in text:
                assert isinstance(result, InferenceError)
            else:
                assert_same(result, model.forward([own], wanted)[0])
