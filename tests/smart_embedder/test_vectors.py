"""Pooling and MUVERA, compared with PyLate and FastEmbed (tests/oracle/references.json)."""

import json
import tracemalloc
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smart_embedder.vectors import (
    MUVERA_WIDTH,
    Muvera,
    cluster,
    muvera_of,
    pool,
    pooling_bytes,
)

RECORDED = Path(__file__).parents[1] / "oracle" / "references.json"
# The references have every 97th number of an encoding, so that each repetition is compared.
STEP = 97
SHAPES = [(1, 16), (5, 48), (70, 48), (12, 1024)]
FACTORS = [2, 3, 50]


def vectors_of(tokens: int, width: int) -> np.ndarray:
    """Unit vectors in a few directions, so that there is something to cluster."""
    random = np.random.default_rng(tokens * width)
    centers = random.standard_normal((8, width))
    vectors = centers[random.integers(8, size=tokens)] + 0.4 * random.standard_normal(
        (tokens, width)
    )
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return json.loads(RECORDED.read_text("utf-8"))


@pytest.mark.parametrize("factor", FACTORS)
def test_pooled_vectors_equal_pylate_scaled_to_unit_length(recorded, factor) -> None:
    expected = np.array(recorded["pooled"][str(factor)], np.float32)
    pooled = pool(vectors_of(70, 48), factor)
    assert pooled.shape == expected.shape
    nearest = pooled @ expected.T  # PyLate returns them in another order.
    np.testing.assert_allclose(nearest.max(axis=1), 1, atol=1e-5)
    assert sorted(nearest.argmax(axis=1)) == list(range(len(expected)))


@given(st.integers(1, 60), st.integers(2, 70))
def test_the_number_and_the_length_of_pooled_vectors(tokens, factor) -> None:
    pooled = pool(vectors_of(tokens, 16), factor)
    assert len(pooled) == max(1, tokens // factor)
    assert pooled.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(pooled, axis=1), 1, rtol=1e-5)


def test_pooled_vectors_are_in_the_order_of_their_first_tokens() -> None:
    a, b, c = np.eye(3, dtype=np.float32)
    np.testing.assert_allclose(pool(np.stack([b, a, b, c, a, c]), 2), [b, a, c], atol=1e-6)


def test_equal_vectors_are_pooled_and_few_vectors_are_returned_unchanged() -> None:
    equal, none = np.tile(np.float32([1, 0, 0, 0]), (9, 1)), np.zeros((0, 4), np.float32)
    np.testing.assert_allclose(pool(equal, 3), equal[: len(pool(equal, 3))])
    for vectors, factor in ((none, 1), (none, 3), (equal[:1], 1), (equal[:1], 3), (equal, 1)):
        assert pool(vectors, factor) is vectors


def test_pooling_uses_the_predicted_memory() -> None:
    vectors = vectors_of(600, 8)
    pool(vectors[:2], 2)
    tracemalloc.start()
    pool(vectors, 2)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert pooling_bytes(600) <= most < 1.2 * pooling_bytes(600)


def merge_the_nearest(distances: np.ndarray, count: int) -> set[frozenset[int]]:
    """Cluster by the definition, with the update of Lance and Williams after every merge."""
    squares = {(a, b): distances[a, b] ** 2 for a, b in combinations(range(len(distances)), 2)}
    members = {point: [point] for point in range(len(distances))}
    while len(members) > count:
        a, b = min(squares, key=squares.__getitem__)
        between = squares.pop((a, b))
        merged = members.pop(b)
        size_a, size_b = len(members[a]), len(merged)
        for other, points in members.items():
            if other == a:
                continue
            to_a, to_b = tuple(sorted((a, other))), tuple(sorted((b, other)))
            size = len(points)
            total = (size + size_a) * squares[to_a] + (size + size_b) * squares.pop(to_b)
            squares[to_a] = (total - size * between) / (size + size_a + size_b)
        members[a] += merged
    return {frozenset(points) for points in members.values()}


@given(st.integers(0, 10_000), st.integers(1, 25), st.data())
def test_clusters_equal_those_of_the_definition(seed, points, data) -> None:
    count = data.draw(st.integers(1, points))
    vectors = np.random.default_rng(seed).normal(size=(points, 6))
    distances = np.linalg.norm(vectors[:, None] - vectors, axis=-1)
    firsts = cluster(distances.copy(), count)
    found = {frozenset(np.flatnonzero(firsts == first).tolist()) for first in firsts}
    assert found == merge_the_nearest(distances, count)
    assert all(min(group) == firsts[min(group)] for group in found)


def test_equal_points_are_divided_into_clusters() -> None:
    assert len(set(cluster(np.zeros((9, 9), np.float32), 3).tolist())) == 3


@pytest.mark.parametrize("side", ["query", "document"])
@pytest.mark.parametrize(("tokens", "width"), SHAPES)
def test_muvera_encodings_equal_fastembed(recorded, tokens, width, side) -> None:
    encoding = muvera_of(width).encode(vectors_of(tokens, width), side)
    assert (encoding.shape, encoding.dtype) == ((MUVERA_WIDTH,), np.float32)
    expected = recorded["muvera"][f"{tokens}x{width}"][side]
    np.testing.assert_allclose(encoding[::STEP], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("width", [1, 8, 15])
def test_muvera_does_not_project_narrow_vectors(width) -> None:
    """The sums of each repetition equal those of the vectors, padded with zeros."""
    vectors = vectors_of(30, width)
    cells = Muvera(width).encode(vectors, "query").reshape(-1, 32, 16)
    np.testing.assert_allclose(
        cells.sum(axis=1)[:, :width], np.tile(vectors.sum(axis=0), (20, 1)), atol=1e-4
    )
    assert not cells[..., width:].any()


def test_muvera_puts_a_zero_vector_into_the_first_cell() -> None:
    (vector,) = vectors_of(1, 16)
    encoder = Muvera(16)
    alone = encoder.encode(vector[None], "query").reshape(20, 32, 16)
    cell = alone.any(axis=2).argmax(axis=1)
    both = encoder.encode(np.stack([np.zeros_like(vector), vector]), "document")
    first = both.reshape(20, 32, 16)[:, 0]
    np.testing.assert_allclose(first, np.where(cell[:, None] == 0, vector / 2, 0), atol=1e-7)
    assert len(set(cell.tolist())) > 5
