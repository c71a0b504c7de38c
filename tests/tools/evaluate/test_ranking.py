"""Rankings kept in pieces are those of the whole, and their figures are those of the definition."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.evaluate.dataset import Document
from tools.evaluate.evaluation import Quality, Ranking, measure, run_of


@given(
    st.integers(1, 4), st.lists(st.integers(1, 9), min_size=1), st.integers(1, 12), st.integers()
)
def test_pieces_rank_as_the_whole_does(
    queries: int, pieces: list[int], most: int, seed: int
) -> None:
    random = np.random.default_rng(abs(seed))
    # Few values, so that many are equal.
    scores = random.integers(0, 5, (queries, sum(pieces))).astype(np.float32)
    ranking, begin = Ranking(queries, most), 0
    for size in pieces:
        ranking.add(begin, scores[:, begin : begin + size])
        begin += size
    whole = np.argsort(-scores, axis=1, kind="stable")[:, :most]
    assert [ranking.of_query(query) for query in range(queries)] == whole.tolist()


def test_candidates_of_one_score_are_ordered_by_another() -> None:
    ranking = Ranking(1, 2)
    ranking.add(0, np.array([[3.0, 1.0]]), np.array([[0.1, 9.0]]))
    ranking.add(2, np.array([[2.0, 0.0]]), np.array([[0.2, 9.0]]))
    assert ranking.of_query(0) == [2, 0]


def test_what_may_not_be_found_is_not_ranked() -> None:
    ranking = Ranking(2, 3)
    ranking.add(0, np.array([[-np.inf, 1.0], [-np.inf, -np.inf]]), np.array([[9.0, 0.1]] * 2))
    ranking.add(2, np.array([[2.0], [-np.inf]]), np.array([[0.2]] * 2))
    assert [ranking.of_query(query) for query in range(2)] == [[2, 1], []]


def test_the_figures_are_those_of_their_definitions() -> None:
    qrels = {"graded": {"a": 2, "b": 1, "c": 0, "d": 1}, "unanswered": {"a": 1}}
    run = {"graded": {"c": 3.0, "a": 2.0, "x": 1.5, "b": 1.0}}
    gained = 2 / math.log2(3) + 1 / math.log2(5)
    ideal = 2 / math.log2(2) + 1 / math.log2(3) + 1 / math.log2(4)
    found = measure(run, qrels)
    assert found.ndcg_10 == pytest.approx(gained / ideal / 2)
    assert found.recall_100 == pytest.approx(2 / 3 / 2)
    assert found.success_1 == 0.0
    perfect = {"graded": {"a": 2.0, "b": 1.0, "d": 0.5}, "unanswered": {"a": -1.0}}
    assert measure(perfect, qrels) == Quality(1.0, 1.0, 1.0)


def test_only_the_first_ten_and_the_first_hundred_count() -> None:
    wrong = {f"x{n:03}": 200.0 - n for n in range(100)}
    eleventh = dict(list(wrong.items())[:10]) | {"a": 0.0}
    assert measure({"q": eleventh}, {"q": {"a": 1}}) == Quality(0.0, 1.0, 0.0)
    assert measure({"q": wrong | {"a": 0.0}}, {"q": {"a": 1}}) == Quality(0.0, 0.0, 0.0)


def test_documents_of_equal_scores_stay_in_the_order_of_the_ranking() -> None:
    class Corpus:
        def __len__(self) -> int:
            return 3

        def read(self, indices) -> list[Document]:
            return [Document(f"d{index}", "") for index in indices]

    run = run_of({"q": [2, 0, 1]}, Corpus())
    assert sorted(run["q"], key=lambda each: -run["q"][each]) == ["d2", "d0", "d1"]
