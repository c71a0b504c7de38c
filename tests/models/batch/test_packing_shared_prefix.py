"""Every beginning is computed once, whatever texts stand together."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smart_embedder.engine.records import TokenIds
from smart_embedder.models.batch.packing import find_shared_prefixes

FEW_TOKENS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=9)


def arrays(texts: list[list[int]]) -> list[TokenIds]:
    return [np.array(text, np.int64) for text in texts]


def beginnings(texts: list[list[int]]) -> list[tuple[int, ...]]:
    """What each token's state depends on."""
    return [tuple(text[: place + 1]) for text in texts for place in range(len(text))]


@given(FEW_TOKENS)
def test_every_beginning_is_computed_once_or_nothing_is_shared(texts) -> None:
    all_of_them = beginnings(texts)
    places = find_shared_prefixes(arrays(texts))
    distinct = len(set(all_of_them))
    if places is None:
        assert distinct > 15 / 16 * len(all_of_them)
        return
    rows, spread = places
    assert len(rows) == distinct
    assert [all_of_them[row] for row in rows[spread]] == all_of_them


def test_texts_without_a_common_beginning_share_nothing() -> None:
    assert find_shared_prefixes(arrays([[1, 2, 3], [4, 2, 3], [5]])) is None


@pytest.mark.parametrize("count", [2, 7])
def test_the_same_text_is_computed_once(count: int) -> None:
    rows, spread = find_shared_prefixes(arrays([[9, 8, 7]] * count))
    assert len(rows) == 3
    assert spread.tolist() == [0, 1, 2] * count


def test_large_and_small_ids_are_told_apart() -> None:
    rows, _ = find_shared_prefixes(arrays([[300_000, 1], [300_000, 2], [255, 1], [255, 2]]))
    assert len(rows) == 6
