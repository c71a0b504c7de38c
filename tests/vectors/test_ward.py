"""Ward's clustering by the nearest-neighbour chain, against merging the nearest two every time."""

from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from smart_embedder.vectors import cluster


def merge_the_nearest(distances: np.ndarray, count: int) -> set[frozenset[int]]:
    """By the definition: the update of Lance and Williams after every merge."""
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
def test_the_clusters_are_those_of_the_definition(seed, points, data) -> None:
    count = data.draw(st.integers(1, points))
    vectors = np.random.default_rng(seed).normal(size=(points, 6))
    distances = np.linalg.norm(vectors[:, None] - vectors, axis=-1)
    firsts = cluster(distances.copy(), count)
    found = {frozenset(np.flatnonzero(firsts == first).tolist()) for first in firsts}
    assert found == merge_the_nearest(distances, count)
    assert all(min(group) == firsts[min(group)] for group in found)


def test_points_in_one_place_are_divided_too() -> None:
    assert len(set(cluster(np.zeros((9, 9), np.float32), 3).tolist())) == 3
