"""The distance between the vectors that two servers make of the canaries."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from smart_embedder.results import SparseVector, TextEmbedding
from tools.verify.canaries import CANARIES, KindCanaries, canaries_of, tolerance_of

ROWS = np.eye(len(CANARIES), dtype=np.float32)
numbers = arrays(np.float32, (3, 4), elements=st.floats(-2, 2, width=32))
weights = st.dictionaries(st.integers(0, 9), st.floats(0.125, 2, width=32))


def sparse(of: dict[int, float]) -> SparseVector:
    ids = sorted(of)
    return SparseVector(np.array(ids, np.int64), np.array([of[each] for each in ids], np.float32))


def distance(one: KindCanaries, other: KindCanaries) -> float:
    return float(one.distances(other).max())


@given(numbers, numbers)
def test_the_distance_is_symmetric_and_that_of_equal_vectors_is_none(first, second) -> None:
    one, other = KindCanaries(first), KindCanaries(second)
    assert distance(one, other) == distance(other, one) <= 2 + 1e-6
    assert distance(one, one) == 0


@given(st.floats(0, 3.14))
def test_of_vectors_of_one_length_it_is_what_is_missing_of_the_cosine(angle: float) -> None:
    first = KindCanaries(np.float32([[1, 0]]))
    second = KindCanaries(np.float32([[np.cos(angle), np.sin(angle)]]))
    assert distance(first, second) == pytest.approx(1 - np.cos(angle), abs=1e-5)


@given(st.lists(weights, min_size=1, max_size=4), st.data())
def test_sparse_vectors_are_compared_by_their_tokens(before, data) -> None:
    after = [{**each} for each in before]
    changed = data.draw(st.integers(0, len(after) - 1))
    after[changed][10] = 1.0
    first, second = (KindCanaries.of_sparse([*map(sparse, each)]) for each in (before, after))
    squares = sum(weight**2 for weight in before[changed].values())
    assert distance(first, second) == pytest.approx(1 / (2 * squares + 1), rel=1e-4)
    assert distance(first, KindCanaries.of_sparse([*map(sparse, before)])) == 0


def test_another_number_of_dimensions_is_as_far_as_can_be() -> None:
    assert distance(KindCanaries(ROWS), KindCanaries(ROWS[:, :2])) == 2


def test_each_kind_that_was_made_has_canaries() -> None:
    made = [TextEmbedding(dense=row, colbert=np.stack([row, row])) for row in ROWS]
    found = canaries_of(made)
    assert found.keys() == {"dense", "colbert"}
    assert np.array_equal(found["colbert"].rows, ROWS)
    found = canaries_of([TextEmbedding(sparse=sparse({3: 0.5}))])
    assert (found["sparse"].rows.tolist(), found["sparse"].columns.tolist()) == ([[0.5]], [3])


def test_the_coarser_number_format_explains_more() -> None:
    assert tolerance_of("float32", "float32") < tolerance_of("float32", "bfloat16")
    assert tolerance_of("bfloat16", None) == tolerance_of("bfloat16", "float32")
    assert tolerance_of("int8", "bfloat16") == tolerance_of("int8", "int8")
