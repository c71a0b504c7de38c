"""Pooled ColBERT vectors against PyLate's, recorded by `record_references`."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smart_embedder.vectors import pool, pooling_bytes
from tests.vectors.conftest import REFERENCES
from tests.vectors.record_references import FACTORS, vectors_of


@pytest.mark.parametrize("factor", FACTORS)
def test_pooled_vectors_are_pylates_of_unit_length(factor) -> None:
    expected = np.array(REFERENCES["pooled"][str(factor)], np.float32)
    pooled = pool(vectors_of(70, 48), factor)
    assert pooled.shape == expected.shape
    nearest = pooled @ expected.T  # PyLate's stand in the order of its labels.
    np.testing.assert_allclose(nearest.max(axis=1), 1, atol=1e-5)
    assert sorted(nearest.argmax(axis=1)) == list(range(len(expected)))


@given(st.integers(1, 60), st.integers(2, 70))
def test_so_many_are_left_and_each_has_unit_length(tokens, factor) -> None:
    pooled = pool(vectors_of(tokens, 16), factor)
    assert len(pooled) == max(1, tokens // factor)
    assert pooled.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(pooled, axis=1), 1, rtol=1e-5)


def test_clusters_stand_in_the_order_of_their_first_tokens() -> None:
    a, b, c = np.eye(3, dtype=np.float32)
    np.testing.assert_allclose(pool(np.stack([b, a, b, c, a, c]), 2), [b, a, c], atol=1e-6)


def test_no_vectors_and_equal_vectors_are_pooled_too() -> None:
    assert pool(np.zeros((0, 4), np.float32), 2).shape == (0, 4)
    equal = np.tile(np.float32([1, 0, 0, 0]), (9, 1))
    np.testing.assert_allclose(pool(equal, 3), equal[: len(pool(equal, 3))])


@pytest.mark.parametrize("tokens", [0, 1, 2, 9])
def test_a_factor_of_one_and_a_text_of_one_token_leave_the_vectors_as_they_are(tokens) -> None:
    vectors = vectors_of(tokens, 8) if tokens else np.zeros((0, 8), np.float32)
    assert pool(vectors, 1) is vectors
    if tokens < 2:
        assert pool(vectors, 3) is vectors


def test_the_memory_that_it_takes_is_known_before() -> None:
    vectors = vectors_of(600, 8)
    pool(vectors[:2], 2)
    tracemalloc.start()
    pool(vectors, 2)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert pooling_bytes(600) <= most < 1.2 * pooling_bytes(600)
