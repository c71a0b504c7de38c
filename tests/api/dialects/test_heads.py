"""A classifier's labels, as text-embeddings-inference has them, and SPLADE's sparse vectors."""

from pathlib import Path

import httpx2
import numpy as np
import pytest
import torch
from transformers import pipeline

from tests.api.conftest import answered as post
from tests.api.conftest import metric
from tests.api.dialects.conftest import LABELS
from tests.api.dialects.test_tei import assert_error

PAIRS = [["hybrid search", "vector rank"], ["memory", "!"], ["naïve"], ["sea", "river " * 20]]


@pytest.fixture(scope="module")
def expected(tiny_nli: Path) -> list[dict[str, float]]:
    """What transformers' own pipeline says of each pair."""
    classify = pipeline("text-classification", str(tiny_nli), device="cpu", top_k=None)
    inputs = [dict(zip(("text", "text_pair"), pair, strict=False)) for pair in PAIRS]
    return [{each["label"]: each["score"] for each in classify(one)} for one in inputs]


def scores_of(predictions: list[dict]) -> list[float]:
    """In the order of the labels, after a look at their own."""
    shown = [each["score"] for each in predictions]
    assert shown == sorted(shown, reverse=True)
    assert all(list(each) == ["score", "label"] for each in predictions)
    return [{each["label"]: each["score"] for each in predictions}[label] for label in LABELS]


@pytest.mark.parametrize("path", ["/predict", "/models/tiny-nli/predict/"])
def test_probabilities_are_those_of_transformers_alone_or_in_a_list(heads, expected, path) -> None:
    together = post(heads, path, inputs=PAIRS)
    for pair, predictions, of_pair in zip(PAIRS, together, expected, strict=True):
        theirs = [of_pair[label] for label in LABELS]
        for each in (predictions, post(heads, path, inputs=pair)):
            np.testing.assert_allclose(scores_of(each), theirs, rtol=0, atol=1e-5)
        logits = torch.tensor(scores_of(post(heads, path, inputs=pair, raw_scores=True)))
        np.testing.assert_allclose(logits.softmax(dim=0), theirs, rtol=0, atol=1e-5)
    alone = post(heads, path, inputs="naïve")
    assert alone == post(heads, path, inputs=["naïve"])
    assert [alone] == post(heads, path, inputs=[["naïve"]])


def test_passages_are_ranked_by_the_probability_of_entailment(heads: httpx2.Client) -> None:
    query, passages = "hybrid search", ["vector", "memory rank", "", "sea " * 30]
    predicted = post(heads, "/predict", inputs=[[query, passage] for passage in passages])
    probability = [scores_of(each)[1] for each in predicted]
    answer = heads.post("/rerank", json={"query": query, "passages": passages, "normalize": True})
    ranked = answer.json()["results"]
    scores = [each["score"] for each in ranked]
    np.testing.assert_allclose(scores, sorted(probability, reverse=True), rtol=0, atol=1e-6)
    assert [each["index"] for each in ranked] == np.argsort(-np.array(probability)).tolist()
    raw = heads.post("/rerank", json={"query": query, "passages": passages}).json()["results"]
    assert [each["index"] for each in raw] == [each["index"] for each in ranked]


def test_one_logit_is_the_sigmoid_of_reranking(full: httpx2.Client) -> None:
    (one,) = post(full, "/predict", inputs=["hybrid search", "vector"])
    body = {"query": "hybrid search", "passages": ["vector"], "normalize": True}
    (ranked,) = full.post("/rerank", json=body).json()["results"]
    assert one["label"] == "LABEL_0"
    assert one["score"] == pytest.approx(ranked["score"], abs=1e-6)


def test_a_text_that_is_too_long_is_an_error_unless_it_may_be_cut(heads: httpx2.Client) -> None:
    for inputs in ("rank " * 500, ["sea", "rank " * 500]):
        refused = heads.post("/predict", json={"inputs": inputs})
        assert "128" in assert_error(refused, 422, "Validation")
        assert len(post(heads, "/predict", inputs=inputs, truncate=True)) == len(LABELS)


@pytest.mark.parametrize(
    "inputs",
    [7, None, {}, ["a", "b", "c"], ["a", 7], ["a", ["b"]], [[]], [["a", "b", "c"]], [[7]]],
    ids=str,
)
def test_what_is_no_text_or_pair_or_list_of_them_is_refused(heads, inputs) -> None:
    refused = heads.post("/predict", json={"inputs": inputs})
    assert "a text, a pair of texts, or a list" in assert_error(refused, 422, "Validation")


def test_what_cannot_be_classified_is_told_apart(heads, client) -> None:
    # Of Hugging Face's client.
    refused = heads.post("/predict", json={"inputs": "sea", "parameters": {"top_k": 1}})
    assert "parameters" in assert_error(refused, 422, "Validation")
    assert post(heads, "/predict", inputs="sea", parameters={})
    assert_error(heads.post("/predict", json={"inputs": []}), 400, "Empty")
    without = client.post("/predict", json={"inputs": "a"})
    assert "RERANKER_MODEL" in assert_error(without, 424, "Backend")
    refused = heads.post("/models/tiny-splade/predict", json={"inputs": "a"})
    assert "no reranker" in assert_error(refused, 422, "Validation")


def test_predictions_count_as_reranked_pairs(heads: httpx2.Client) -> None:
    def counted() -> tuple[float, float]:
        requests = metric(heads, "rerank_requests_total", status="success")
        return requests, metric(heads, "rerank_pairs_processed_total")

    requests, pairs = counted()
    post(heads, "/predict", inputs=PAIRS)
    assert counted() == (requests + 1, pairs + len(PAIRS))


# SPLADE's weights are the sparse kind, beside the dense vectors of another model.

TEXTS = ["hybrid search", "", "memory, rank!", "sea " * 100]


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
