"""Ward's hierarchical clustering.

SciPy's keeps the interpreter's lock: while it clustered the 8,190 tokens of a long text, every
other request stood still for 1.6 seconds. Between the steps of this one other threads run.
"""

import numpy as np
import numpy.typing as npt


def cluster(distances: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.intp]:
    """For each of `n` points the first point of its cluster, `[n]`, of `count` clusters in all.

    `distances` `[n, n]` are symmetric, and are overwritten. Source: Murtagh's nearest-neighbour
    chain with the update of Lance and Williams, as `scipy.cluster.hierarchy.linkage` does it.
    """
    heights, left, right = _merge_all(np.square(distances, out=distances))
    parents = np.arange(len(distances))
    for merge in np.argsort(heights, kind="stable")[: len(distances) - count]:
        first, second = _root(parents, left[merge]), _root(parents, right[merge])
        parents[max(first, second)] = min(first, second)
    return np.array([_root(parents, point) for point in range(len(distances))], np.intp)


def _merge_all(
    squares: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[np.float64], list[int], list[int]]:
    """The squared distance of every merge, and a point of each of the two clusters it joins."""
    np.fill_diagonal(squares, np.inf)
    sizes = np.ones(len(squares))
    left: list[int] = []
    right: list[int] = []
    heights: list[float] = []
    chain: list[int] = []
    for _ in range(len(squares) - 1):
        # A point whose cluster was joined to another has no size any more.
        chain = chain or [int(sizes.argmax())]
        first, second = _mutual_neighbours(squares, chain)
        heights.append(float(squares[first, second]))
        left.append(first)
        right.append(second)
        _join(squares, sizes, first, second)
    return np.array(heights), left, right


def _mutual_neighbours(squares: npt.NDArray[np.float32], chain: list[int]) -> tuple[int, int]:
    """Follow the chain to two clusters that are each other's nearest, and take them off it."""
    while True:
        last = chain[-1]
        nearest = int(squares[last].argmin())
        if len(chain) > 1 and squares[last, chain[-2]] <= squares[last, nearest]:
            return chain.pop(), chain.pop()
        chain.append(nearest)


def _join(
    squares: npt.NDArray[np.float32], sizes: npt.NDArray[np.float64], first: int, second: int
) -> None:
    """Make one cluster of two, in the place of `second`."""
    a, b, between = sizes[first], sizes[second], squares[first, second]
    joined = ((sizes + a) * squares[first] + (sizes + b) * squares[second] - sizes * between) / (
        sizes + a + b
    )
    joined[[first, second]] = np.inf
    squares[second] = squares[:, second] = joined
    squares[first] = squares[:, first] = np.inf
    sizes[first], sizes[second] = 0, a + b


def _root(parents: npt.NDArray[np.intp], point: int) -> int:
    while parents[point] != point:
        parents[point] = parents[parents[point]]
        point = int(parents[point])
    return point
