"""SPLADE's weights as the sparse kind, beside the dense vectors of another model."""

from pathlib import Path

import httpx2
import numpy as np
import pytest
from sentence_transformers import SparseEncoder

from tests.api.dialects.test_tei import assert_error, post

TEXTS = ["hybrid search", "", "memory, rank!", "sea " * 100]


@pytest.fixture(scope="module")
def expected(tiny_splade: Path) -> np.ndarray:
    return SparseEncoder(str(tiny_splade), device="cpu").encode(TEXTS).to_dense().numpy()


def assert_same(weights: list[dict[int, float]], expected: np.ndarray) -> None:
    made = np.zeros_like(expected)
    for row, own in zip(made, weights, strict=True):
        row[[*own]] = [*own.values()]
    np.testing.assert_allclose(made, expected, rtol=0, atol=1e-5)


def test_one_request_gets_the_vectors_of_both_models(heads: httpx2.Client, expected) -> None:
    answer = post(heads, "/embeddings/", sentences=TEXTS)
    kinds = [item["embeddings"] for item in answer["data"]]
    assert_same(
        [{int(key): each["sparse"][key] for key in each["sparse"]} for each in kinds], expected
    )
    names = [answer[f"{kind}_model_name"] for kind in ("dense", "sparse")]
    assert names == ["tiny-m3", "tiny-splade"]
    alone = post(heads, "/embeddings/", sentences=TEXTS, return_sparse=False)["data"]
    for item, each in zip(alone, kinds, strict=True):
        assert each["colbert"] is None
        np.testing.assert_allclose(each["dense"], item["embeddings"]["dense"], rtol=0, atol=1e-5)
    for path in ("/embed_sparse", "/models/tiny-splade/embed_sparse"):
        told = post(heads, path, inputs=TEXTS)
        assert_same([{each["index"]: each["value"] for each in text} for text in told], expected)


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
