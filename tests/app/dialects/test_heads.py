"""SPLADE's sparse vectors beside dense ones, and a cross-encoder of several labels."""

from pathlib import Path

import httpx2
import numpy as np
from transformers import pipeline

from tests.app.conftest import answered as post
from tests.app.dialects.test_tei import assert_error

TEXTS = ["hybrid search", "", "memory, rank!", "sea " * 100]


def test_passages_are_ranked_by_the_probability_of_entailment(heads, tiny_nli: Path) -> None:
    """What transformers' own pipeline says of each pair."""
    classify = pipeline("text-classification", str(tiny_nli), device="cpu", top_k=None)
    query, passages = "hybrid search", ["vector", "memory rank", "naïve", "sea " * 30]
    pairs = [{"text": query, "text_pair": passage} for passage in passages]
    probability = [
        {each["label"]: each["score"] for each in classify(pair)}["entailment"] for pair in pairs
    ]
    answer = heads.post("/rerank", json={"query": query, "passages": passages, "normalize": True})
    ranked = answer.json()["results"]
    scores = [each["score"] for each in ranked]
    np.testing.assert_allclose(scores, sorted(probability, reverse=True), rtol=0, atol=1e-5)
    assert [each["index"] for each in ranked] == np.argsort(-np.array(probability)).tolist()
    raw = heads.post("/rerank", json={"query": query, "passages": passages}).json()["results"]
    assert [each["index"] for each in raw] == [each["index"] for each in ranked]


def test_one_request_gets_the_vectors_of_both_models(heads: httpx2.Client, client) -> None:
    answer = post(heads, "/embeddings/", sentences=TEXTS, sparse_as_indices=True)
    names = [answer[f"{kind}_model_name"] for kind in ("dense", "sparse")]
    assert names == ["tiny-m3", "tiny-splade"]
    alone = post(client, "/embeddings/", sentences=TEXTS)["data"]
    for path in ("/embed_sparse", "/models/tiny-splade/embed_sparse"):
        told = post(heads, path, inputs=TEXTS)
        for item, other, weights in zip(answer["data"], alone, told, strict=True):
            dense, sparse, colbert = item["embeddings"].values()
            assert colbert is None
            np.testing.assert_allclose(dense, other["embeddings"]["dense"], rtol=0, atol=1e-5)
            assert [each["index"] for each in weights] == sparse["indices"]
            values = [each["value"] for each in weights]
            np.testing.assert_allclose(values, sparse["values"], rtol=0, atol=1e-5)


def test_token_strings_are_those_of_the_whole_vocabulary(heads: httpx2.Client) -> None:
    body = {"sentences": ["search"], "return_tokens": True, "return_dense": False}
    (item,) = post(heads, "/embeddings/", **body)["data"]
    strings = item["tokens"]["sparse"]
    assert len(strings) == len(item["embeddings"]["sparse"])
    tokens = post(heads, "/models/tiny-splade/tokenize", inputs="search")[0]
    # The model weighs words that the text does not hold.
    assert set(strings) - {each["text"] for each in tokens}


def test_a_kind_that_neither_model_makes_is_refused(heads: httpx2.Client) -> None:
    body = {"sentences": ["search"], "return_colbert": True}
    refused = heads.post("/embeddings/", json=body)
    assert (refused.status_code, refused.json()["code"]) == (400, "kind_not_made")
    refused = heads.post("/models/tiny-splade/embed", json={"inputs": "a"})
    assert "tiny-splade" in assert_error(refused, 400, "Validation")
