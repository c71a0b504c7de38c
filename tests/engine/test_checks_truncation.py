"""Which texts are reported as cut, and how a refusal names them."""

import numpy as np
import pytest

from smart_embedder.engine.checks import (
    pair_truncations,
    refuse_truncation,
    text_truncations,
)
from smart_embedder.engine.records import TokenizedPair, TokenizedText, Truncation
from smart_embedder.errors import TextTooLongError
from tests.engine.fakes import FakeModel, FakeReranker


def text(kept: int, had: int, *, exact: bool = True) -> TokenizedText:
    return TokenizedText(np.zeros(kept, np.int64), had, exact)


def test_the_texts_that_were_cut_are_reported_with_their_place_and_side() -> None:
    texts = [text(3, 3), text(3, 9), text(0, 0), text(2, 7, exact=False)]
    assert text_truncations(FakeModel(), texts, "inputs", "left") == [
        Truncation("inputs", 1, "fake", 3, 9, "left"),
        Truncation("inputs", 3, "fake", 2, 7, "left", exact=False),
    ]


def pair(query: tuple[int, int], passage: tuple[int, int], **exact: bool) -> TokenizedPair:
    return TokenizedPair(np.zeros(1, np.int64), query[1], query[0], passage[1], passage[0], **exact)


def test_a_query_is_reported_once_by_the_pair_that_cut_it_most_and_passages_each() -> None:
    pairs = [
        pair((5, 8), (4, 4)),
        pair((2, 8), (3, 6), query_exact=False, passage_exact=False),
        pair((8, 8), (1, 2)),
    ]
    assert pair_truncations(FakeReranker(), pairs, "left") == [
        Truncation("query", 0, "fake", 2, 8, exact=False),
        Truncation("passages", 1, "fake", 3, 6, "left", exact=False),
        Truncation("passages", 2, "fake", 1, 2, "left"),
    ]
    assert pair_truncations(FakeReranker(), [pair((8, 8), (4, 4))], "right") == []


def test_a_refusal_tells_of_the_first_in_words_and_of_ten_at_most() -> None:
    refuse_truncation([])
    cuts = [Truncation("sentences", number, "m", 8, 11) for number in range(4, 30)]
    with pytest.raises(TextTooLongError) as refused:
        refuse_truncation(cuts)
    assert str(refused.value).startswith(
        "the text at index 4 has 11 tokens, and m reads at most 8 of it: shorten it"
    )
    pointers = [problem["pointer"] for problem in refused.value.problems]
    assert pointers == [f"/sentences/{number}" for number in range(4, 14)]
    with pytest.raises(TextTooLongError, match="the query has at least 11 tokens") as refused:
        refuse_truncation([Truncation("query", 0, "m", 8, 11, exact=False)])
    assert refused.value.problems[0]["pointer"] == "/query"
