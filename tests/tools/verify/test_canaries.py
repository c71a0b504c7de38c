"""The distance between two servers' vectors of the canaries."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from smart_embedder.results import SparseVector, TextEmbedding
from tools.verify.canaries import CANARIES, KindCanaries, choose_tolerance, group_by_kind

ROWS = np.eye(len(CANARIES), dtype=np.float32)
numbers = arrays(np.float32, (3, 4), elements=st.floats(-2, 2, width=32))
weights = st.dictionaries(st.integers(0, 9), st.floats(0.125, 2, width=32))


def sparse(weights: dict[int, float]) -> SparseVector:
    ids = sorted(weights)
    values = np.array([weights[id_] for id_ in ids], np.float32)
    return SparseVector(np.array(ids, np.int64), values)


def distance(one: KindCanaries, other: KindCanaries) -> float:
    return float(one.distances(other).max())


@given(numbers, numbers)
def test_the_distance_is_symmetric_and_0_for_equal_vectors(first, second) -> None:
    one, other = KindCanaries(first), KindCanaries(second)
    assert distance(one, other) == distance(other, one) <= 2 + 1e-6
    assert distance(one, one) == 0


@given(st.floats(0, 3.14))
def test_the_distance_of_vectors_of_equal_length_is_1_minus_the_cosine(angle: float) -> None:
    first = KindCanaries(np.float32([[1, 0]]))
    second = KindCanaries(np.float32([[np.cos(angle), np.sin(angle)]]))
    assert distance(first, second) == pytest.approx(1 - np.cos(angle), abs=1e-5)


@given(st.lists(weights, min_size=1, max_size=4), st.data())
def test_sparse_vectors_are_compared_by_their_tokens(before, data) -> None:
    after = [{**row} for row in before]
    changed = data.draw(st.integers(0, len(after) - 1))
    after[changed][10] = 1.0
    first, second = (KindCanaries.of_sparse([*map(sparse, rows)]) for rows in (before, after))
    squares = sum(weight**2 for weight in before[changed].values())
    assert distance(first, second) == pytest.approx(1 / (2 * squares + 1), rel=1e-4)
    assert distance(first, KindCanaries.of_sparse([*map(sparse, before)])) == 0


def test_the_distance_is_2_if_the_dimensions_differ() -> None:
    assert distance(KindCanaries(ROWS), KindCanaries(ROWS[:, :2])) == 2


def test_vectors_are_grouped_by_kind() -> None:
    embeddings = [TextEmbedding(dense=row, colbert=np.stack([row, row])) for row in ROWS]
    found = group_by_kind(embeddings)
    assert found.keys() == {"dense", "colbert"}
    assert np.array_equal(found["colbert"].rows, ROWS)
    found = group_by_kind([TextEmbedding(sparse=sparse({3: 0.5}))])
    assert (found["sparse"].rows.tolist(), found["sparse"].columns.tolist()) == ([[0.5]], [3])


def test_the_tolerance_is_that_of_the_coarser_number_format() -> None:
    assert choose_tolerance("float32", "float32") < choose_tolerance("float32", "bfloat16")
    assert choose_tolerance("bfloat16", None) == choose_tolerance("bfloat16", "float32")
    assert choose_tolerance("int8", "bfloat16") == choose_tolerance("int8", "int8")
