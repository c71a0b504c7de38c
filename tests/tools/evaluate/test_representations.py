"""Every representation scores as its definition says, and its bytes are those that travel."""

import numpy as np
import pytest

from smart_embedder.pipelines.reranking import score
from smart_embedder.results import SparseVector, TextEmbedding
from smart_embedder.vectors import OUTPUT_DTYPES, muvera_of, quantize
from tools.evaluate.representations import KINDS, Form, all_representations, restore

WIDTH = 32


def texts(count: int, seed: int) -> list[TextEmbedding]:
    random = np.random.default_rng(seed)
    return [one_text(random, tokens) for tokens in random.integers(1, 12, count)]


def one_text(random: np.random.Generator, tokens: int) -> TextEmbedding:
    ids = np.unique(random.integers(0, 20, tokens))
    return TextEmbedding(
        dense=unit(random.normal(size=WIDTH)),
        sparse=SparseVector(ids, random.random(len(ids), np.float32)),
        colbert=unit(random.normal(size=(tokens, WIDTH))),
    )


def unit(vectors: np.ndarray) -> np.ndarray:
    return (vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)).astype(np.float32)


def forms() -> list[Form]:
    return [asked for asked in all_representations(frozenset(KINDS)) if isinstance(asked, Form)]


def test_whole_kinds_score_as_late_interaction_does() -> None:
    queries, documents = texts(7, 1), texts(9, 2)
    parts = [[score(query, text) for text in documents] for query in queries]
    for kind in KINDS:
        expected = [[getattr(part, kind) for part in row] for row in parts]
        found = Form(kind, kind).score(queries, documents).scores
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_muvera_encodes_each_side_in_its_own_way() -> None:
    queries, documents, encode = texts(3, 8), texts(4, 9), muvera_of(WIDTH).encode
    asked = np.stack([encode(text.colbert, "query") for text in queries])
    found = np.stack([encode(text.colbert, "document") for text in documents])
    scores = Form("muvera", "colbert").score(queries, documents).scores
    np.testing.assert_allclose(scores, asked @ found.T, atol=1e-6)


def test_smaller_forms_score_nearly_as_whole_ones() -> None:
    documents = texts(20, 7)
    for form in forms():
        best = form.score(documents, documents).scores.argmax(axis=1)
        assert (best == np.arange(20)).mean() > 0.6, form.name


def test_the_representations_are_those_of_the_kinds_that_are_made() -> None:
    alone = [asked.name for asked in all_representations(frozenset({"sparse"}))]
    assert alone == ["sparse"]
    both = [asked.name for asked in all_representations(frozenset({"dense", "sparse"}))]
    assert both[:4] == ["dense", "sparse", "fused", "rrf"]
    every = [asked.name for asked in all_representations(frozenset(KINDS))]
    assert {"fused", "fused dense+sparse", "rrf sparse+colbert", "muvera"} < {*every}


@pytest.mark.parametrize("dtype", OUTPUT_DTYPES)
def test_a_client_restores_what_was_sent(dtype) -> None:
    vectors = texts(1, 3)[0].colbert
    restored = restore(quantize(vectors, dtype), WIDTH)
    assert restored.shape == vectors.shape
    if dtype in {"binary", "ubinary"}:
        np.testing.assert_array_equal(restored, np.where(vectors > 0, 1, -1))
    else:
        np.testing.assert_allclose(restored, vectors, atol=0.01)


def test_the_bytes_are_those_that_travel() -> None:
    documents = texts(5, 4)
    sizes = {form.name: form.score(texts(2, 5), documents).num_bytes for form in forms()}
    tokens = sum(len(each.colbert) for each in documents)
    assert sizes["dense"] == 5 * WIDTH * 4
    assert sizes["dense, int8"] == 5 * (WIDTH + 4)
    assert sizes["dense, binary"] == 5 * WIDTH / 8
    assert sizes["colbert, float16"] == tokens * WIDTH * 2
    assert sizes["colbert, uint8"] == tokens * (WIDTH + 4)
    assert sizes["sparse"] == 8 * sum(len(each.sparse.indices) for each in documents)
    assert sizes["colbert, pooled by 4, float32"] < sizes["colbert"] / 2
    assert sizes["muvera"] == 5 * 10_240 * 4
