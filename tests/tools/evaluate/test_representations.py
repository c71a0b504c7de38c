"""Scores and sizes of each representation."""

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
    return [item for item in all_representations(frozenset(KINDS)) if isinstance(item, Form)]


def test_kinds_in_float32_score_as_late_interaction_does() -> None:
    queries, documents = texts(7, 1), texts(9, 2)
    parts = [[score(query, text) for text in documents] for query in queries]
    for kind in KINDS:
        expected = [[getattr(part, kind) for part in row] for row in parts]
        found = Form(kind, kind).score(queries, documents).scores
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_muvera_encodes_queries_and_documents_differently() -> None:
    queries, documents, encode = texts(3, 8), texts(4, 9), muvera_of(WIDTH).encode
    encoded_queries = np.stack([encode(text.colbert, "query") for text in queries])
    encoded = np.stack([encode(text.colbert, "document") for text in documents])
    scores = Form("muvera", "colbert").score(queries, documents).scores
    np.testing.assert_allclose(scores, encoded_queries @ encoded.T, atol=1e-6)


def test_quantized_and_pooled_forms_still_find_the_same_text() -> None:
    documents = texts(20, 7)
    for form in forms():
        best = form.score(documents, documents).scores.argmax(axis=1)
        assert (best == np.arange(20)).mean() > 0.6, form.name


def test_the_representations_are_those_of_the_available_kinds() -> None:
    def names(*kinds: str) -> list[str]:
        return [representation.name for representation in all_representations(frozenset(kinds))]

    assert names("sparse") == ["sparse"]
    assert names("dense", "sparse")[:4] == ["dense", "sparse", "fused", "rrf"]
    assert {"fused", "fused dense+sparse", "rrf sparse+colbert", "muvera"} < {*names(*KINDS)}


@pytest.mark.parametrize("dtype", OUTPUT_DTYPES)
def test_quantized_vectors_are_restored(dtype) -> None:
    vectors = texts(1, 3)[0].colbert
    restored = restore(quantize(vectors, dtype), WIDTH)
    assert restored.shape == vectors.shape
    if dtype in {"binary", "ubinary"}:
        np.testing.assert_array_equal(restored, np.where(vectors > 0, 1, -1))
    else:
        np.testing.assert_allclose(restored, vectors, atol=0.01)


def test_sizes_are_those_of_the_quantized_vectors() -> None:
    documents = texts(5, 4)
    sizes = {form.name: form.score(texts(2, 5), documents).num_bytes for form in forms()}
    tokens = sum(len(text.colbert) for text in documents)
    assert sizes["dense"] == 5 * WIDTH * 4
    assert sizes["dense, int8"] == 5 * (WIDTH + 4)
    assert sizes["dense, binary"] == 5 * WIDTH / 8
    assert sizes["colbert, float16"] == tokens * WIDTH * 2
    assert sizes["colbert, uint8"] == tokens * (WIDTH + 4)
    assert sizes["sparse"] == 8 * sum(len(text.sparse.indices) for text in documents)
    assert sizes["colbert, pooled by 4, float32"] < sizes["colbert"] / 2
    assert sizes["muvera"] == 5 * 10_240 * 4
