"""Every representation scores as its definition says, and its bytes are those that travel."""

import numpy as np
import pytest

from smart_embedder.engine.records import SparseVector, TextEmbedding
from smart_embedder.engine.requests.reranking import score
from smart_embedder.vectors import OUTPUT_DTYPES, quantize
from tools.evaluate.representations import KINDS, Piece, Queries, all_representations, restore

WIDTH = 32
WEIGHTS = {"dense": 1.0, "sparse": 0.5, "colbert": 2.0}


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


@pytest.fixture(scope="module")
def scored() -> dict[str, np.ndarray]:
    piece = Piece(Queries(texts(7, 1)), texts(9, 2))
    return {
        each.name: each.score(piece).scores
        for each in all_representations(frozenset(KINDS), (4,), WEIGHTS)
        if each.score
    }


def test_the_basic_ones_score_as_late_interaction_does(scored) -> None:
    parts = [[score(query, text) for text in texts(9, 2)] for query in texts(7, 1)]
    for kind in ("dense", "sparse", "colbert"):
        expected = [[getattr(each, kind) for each in row] for row in parts]
        np.testing.assert_allclose(scored[kind], expected, atol=1e-6)
    for name, kinds in {"fused": KINDS, "fused dense+sparse": ("dense", "sparse")}.items():
        weights = [WEIGHTS[kind] for kind in kinds]
        fused = [
            [np.average([getattr(each, kind) for kind in kinds], weights=weights) for each in row]
            for row in parts
        ]
        np.testing.assert_allclose(scored[name], fused, atol=1e-6)


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
    piece = Piece(Queries(texts(2, 5)), documents)
    sizes = {
        each.name: each.score(piece).num_bytes
        for each in all_representations(frozenset(KINDS), (4,))
        if each.score
    }
    tokens = sum(len(each.colbert) for each in documents)
    assert sizes["dense"] == 5 * WIDTH * 4
    assert sizes["dense, int8"] == 5 * (WIDTH + 4)
    assert sizes["dense, binary"] == 5 * WIDTH / 8
    assert sizes["colbert, float16"] == tokens * WIDTH * 2
    assert sizes["colbert, uint8"] == tokens * (WIDTH + 4)
    assert sizes["sparse"] == 8 * sum(len(each.sparse.indices) for each in documents)
    assert sizes["colbert, pooled by 4, float32"] < sizes["colbert"] / 2
    assert sizes["muvera"] == 5 * 10_240 * 4
