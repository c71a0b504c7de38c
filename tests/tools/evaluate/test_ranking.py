"""Rankings in chunks, fusion, figures and significance."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.evaluate.evaluation import Ranking
from tools.evaluate.quality import Difference, compare, measure
from tools.evaluate.representations import KINDS, RRF_WEIGHTS, Scored, fuse_ranks


@given(
    st.integers(1, 4), st.lists(st.integers(1, 9), min_size=1), st.integers(1, 12), st.integers()
)
def test_documents_in_chunks_are_ranked_as_all_at_once(
    queries: int, chunks: list[int], limit: int, seed: int
) -> None:
    random = np.random.default_rng(abs(seed))
    # Few values, so that many are equal.
    scores = random.integers(0, 5, (queries, sum(chunks))).astype(np.float32)
    ranking, start = Ranking(queries, limit), 0
    for size in chunks:
        ranking.add(Scored(scores[:, start : start + size], size))
        start += size
    assert ranking.num_bytes == start
    whole = np.argsort(-scores, axis=1, kind="stable")[:, :limit]
    assert [ranking.of_query(query) for query in range(queries)] == whole.tolist()


def test_a_document_with_a_score_of_minus_infinity_is_not_ranked() -> None:
    ranking = Ranking(2, 3)
    ranking.add(Scored(np.array([[-np.inf, 1.0], [-np.inf, -np.inf]]), 0))
    ranking.add(Scored(np.array([[2.0], [-np.inf]]), 0))
    assert [ranking.of_query(query) for query in range(2)] == [[2, 1], []]


def test_the_figures_are_those_of_their_definitions() -> None:
    qrels = {"graded": {"a": 2, "b": 1, "c": 0, "d": 1}, "unanswered": {"a": 1}}
    run = {"graded": ["c", "a", "x", "b"]}
    gained = 2 / math.log2(3) + 1 / math.log2(5)
    ideal = 2 / math.log2(2) + 1 / math.log2(3) + 1 / math.log2(4)
    np.testing.assert_allclose(
        measure(run, qrels), [[gained / ideal, 2 / 3, 0.0], [0.0, 0.0, 0.0]], rtol=1e-6
    )
    perfect = {"graded": ["a", "b", "d"], "unanswered": ["a"]}
    assert measure(perfect, qrels).tolist() == [[1.0, 1.0, 1.0]] * 2
    # Only the first ten and the first hundred count.
    wrong = [f"x{n:03}" for n in range(100)]
    assert measure({"q": [*wrong[:10], "a"]}, {"q": {"a": 1}}).tolist() == [[0.0, 1.0, 0.0]]
    assert measure({"q": [*wrong, "a"]}, {"q": {"a": 1}}).tolist() == [[0.0, 0.0, 0.0]]


def test_reciprocal_ranks_are_fused_as_the_page_does() -> None:
    # The case of tests/app/ui/test_logic.py.
    rankings = {"dense": [4, 2, 9], "sparse": [2, 4, 7], "colbert": [2]}
    assert fuse_ranks(rankings, 0, dict(zip(KINDS, RRF_WEIGHTS, strict=True)))[:3] == [2, 4, 9]
    # With a large constant two fourth ranks count more than a first one. Equal sums keep the order
    # of the documents.
    rankings, equal = {"dense": [1, 5, 6, 2], "sparse": [7, 8, 9, 2]}, dict.fromkeys(KINDS, 1.0)
    assert [fuse_ranks(rankings, constant, equal)[0] for constant in (60, 2)] == [2, 1]


@pytest.mark.parametrize(
    ("differences", "shown"),
    [
        ([0.0] * 50, False),
        ([0.2, -0.2] * 25, False),
        # Equal differences: too few, and enough.
        ([0.3] * 4, False),
        ([0.3] * 12, True),
        ([-0.1, -0.2] * 25, True),
        ([1.0], False),
    ],
)
def test_a_difference_is_shown_if_it_is_significant(differences: list[float], shown: bool) -> None:
    baseline = np.full(len(differences), 0.5)
    found = compare(baseline + differences, baseline)
    assert found.is_shown == shown
    assert found.mean == pytest.approx(np.mean(differences))
    assert found == compare(baseline + differences, baseline)  # The seed is fixed.


def test_a_significant_difference_needs_the_interval_and_the_test() -> None:
    assert not Difference(0.1, (-0.01, 0.2), 0.04).is_shown
    assert not Difference(0.1, (0.01, 0.2), 0.06).is_shown
    assert Difference(-0.1, (-0.2, -0.01), 0.04).is_shown
