"""The sparse head's bookkeeping against the plainest way to write it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from app.models.tasks.heads import LexicalVocabulary

IGNORED = np.array([0, 1, 2, 3])
PAIR = st.tuples(st.integers(0, 250_001), st.floats(0, 4, width=32))
CASE = st.lists(st.lists(PAIR, min_size=1, max_size=12), min_size=1, max_size=8)


def one_by_one(pairs: list[tuple[int, float]]) -> dict[int, float]:
    weights: dict[int, float] = {}
    for token, weight in pairs:
        if token not in IGNORED and weight > weights.get(token, 0):
            weights[token] = weight
    return weights


@given(CASE)
def test_each_text_keeps_its_largest_weight_for_each_token(case) -> None:
    ids = [np.array([token for token, _ in pairs], np.int64) for pairs in case]
    weights = [np.array([weight for _, weight in pairs], np.float32) for pairs in case]
    vectors = LexicalVocabulary(IGNORED).sparse_vectors(ids, weights)
    assert len(vectors) == len(case)
    for pairs, vector in zip(case, vectors, strict=True):
        found = dict(zip(vector.indices.tolist(), vector.values.tolist(), strict=True))
        assert found == one_by_one(pairs)
        assert vector.indices.tolist() == sorted(found)
        assert vector.values.dtype == np.float32
