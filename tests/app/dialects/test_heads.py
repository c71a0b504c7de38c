"""SPLADE with a dense model, and a cross-encoder with several labels."""

from pathlib import Path

import httpx2
import numpy as np
import pytest
from transformers import BertForMaskedLM, BertForSequenceClassification, pipeline

from tests.app.conftest import answered as post
from tests.app.conftest import serving
from tests.app.dialects.test_tei import assert_error
from tests.support.wordpiece import save_model, save_splade

TEXTS = ["hybrid search", "", "memory, rank!", "sea " * 100]
LABELS = ("contradiction", "entailment", "neutral")


@pytest.fixture(scope="module")
def tiny_nli(tmp_path_factory) -> Path:
    """A cross-encoder with the labels of natural language inference."""
    folder = tmp_path_factory.mktemp("classifier") / "tiny-nli"
    return save_model(folder, BertForSequenceClassification, id2label=dict(enumerate(LABELS)))


@pytest.fixture(scope="module")
def tiny_splade(tmp_path_factory) -> Path:
    """A masked language model for sparse vectors."""
    return save_splade(tmp_path_factory.mktemp("sparse") / "tiny-splade", BertForMaskedLM)


@pytest.fixture(scope="module")
def heads(tiny_splade: Path, tiny_m3: Path, tiny_nli: Path):
    """A client of a service with SPLADE, bge-m3 for dense vectors and a classifier as reranker."""
    models = {"embedding": tiny_splade, "dense_embedding": tiny_m3, "reranker": tiny_nli}
    with serving(**{f"{role}_model": str(folder) for role, folder in models.items()}) as client:
        yield client


def test_passages_are_ranked_by_the_probability_of_entailment(heads, tiny_nli: Path) -> None:
    """The scores are those of transformers' pipeline."""
    classify = pipeline("text-classification", str(tiny_nli), device="cpu", top_k=None)
    query, passages = "hybrid search", ["vector", "memory rank", "naïve", "sea " * 30]
    pairs = [{"text": query, "text_pair": passage} for passage in passages]
    probability = [
        {label["label"]: label["score"] for label in classify(pair)}["entailment"] for pair in pairs
    ]
    answer = heads.post("/rerank", json={"query": query, "passages": passages, "normalize": True})
    ranked = answer.json()["results"]
    scores = [item["score"] for item in ranked]
    np.testing.assert_allclose(scores, sorted(probability, reverse=True), rtol=0, atol=1e-5)
    assert [item["index"] for item in ranked] == np.argsort(-np.array(probability)).tolist()
    raw = heads.post("/rerank", json={"query": query, "passages": passages}).json()["results"]
    assert [item["index"] for item in raw] == [item["index"] for item in ranked]


def test_one_request_gets_the_vectors_of_both_models(heads: httpx2.Client, client) -> None:
    answer = post(heads, "/embeddings/", sentences=TEXTS, sparse_as_indices=True)
    names = [answer[f"{kind}_model_name"] for kind in ("dense", "sparse")]
    assert names == ["tiny-m3", "tiny-splade"]
    alone = post(client, "/embeddings/", sentences=TEXTS)["data"]
    for path in ("/embed_sparse", "/models/tiny-splade/embed_sparse"):
        sparse_vectors = post(heads, path, inputs=TEXTS)
        for item, other, weights in zip(answer["data"], alone, sparse_vectors, strict=True):
            dense, sparse, colbert = item["embeddings"].values()
            assert colbert is None
            np.testing.assert_allclose(dense, other["embeddings"]["dense"], rtol=0, atol=1e-5)
            assert [weight["index"] for weight in weights] == sparse["indices"]
            values = [weight["value"] for weight in weights]
            np.testing.assert_allclose(values, sparse["values"], rtol=0, atol=1e-5)


def test_token_strings_are_those_of_the_whole_vocabulary(heads: httpx2.Client) -> None:
    body = {"sentences": ["search"], "return_tokens": True, "return_dense": False}
    (item,) = post(heads, "/embeddings/", **body)["data"]
    strings = item["tokens"]["sparse"]
    assert len(strings) == len(item["embeddings"]["sparse"])
    tokens = post(heads, "/models/tiny-splade/tokenize", inputs="search")[0]
    # The model weighs words that are not in the text.
    assert set(strings) - {token["text"] for token in tokens}


def test_a_kind_that_neither_model_makes_is_refused(heads: httpx2.Client) -> None:
    body = {"sentences": ["search"], "return_colbert": True}
    refused = heads.post("/embeddings/", json=body)
    assert (refused.status_code, refused.json()["code"]) == (400, "kind_not_made")
    refused = heads.post("/models/tiny-splade/embed", json={"inputs": "a"})
    assert "tiny-splade" in assert_error(refused, 400, "Validation")
