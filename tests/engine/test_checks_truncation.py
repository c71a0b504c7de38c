"""What is refused: options without effect, and texts that may not be cut."""

import numpy as np
import pytest

from smart_embedder.engine.checks import (
    check_rendering,
    check_truncations,
    pair_truncations,
    text_truncations,
)
from smart_embedder.engine.records import (
    DENSE,
    EmbedRequest,
    Outputs,
    TokenizedPair,
    TokenizedText,
    Truncation,
    TruncationOptions,
)
from smart_embedder.errors import InvalidRequestError, TextTooLongError
from tests.engine.fakes import FakeModel, FakeReranker

REFUSE = TruncationOptions(truncate=False)


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
    check_truncations([], REFUSE)
    cuts = [Truncation("sentences", number, "m", 8, 11) for number in range(4, 30)]
    check_truncations(cuts, TruncationOptions())
    with pytest.raises(TextTooLongError) as refused:
        check_truncations(cuts, REFUSE)
    assert str(refused.value).startswith(
        "the text at index 4 has 11 tokens, and m reads at most 8 of it: shorten it"
    )
    pointers = [problem["pointer"] for problem in refused.value.problems]
    assert pointers == [f"/sentences/{number}" for number in range(4, 14)]
    with pytest.raises(TextTooLongError, match="the query has at least 11 tokens") as refused:
        check_truncations([Truncation("query", 0, "m", 8, 11, exact=False)], REFUSE)
    assert refused.value.problems[0]["pointer"] == "/query"


REST, EVERY = Outputs(sparse=True), Outputs(dense=True, sparse=True, colbert=True)
POOLED = {"colbert_pool_factor": 2}


@pytest.mark.parametrize(
    ("outputs", "asked", "message"),
    [
        (REST, {"output_dtype": "int8"}, "output_dtype has no effect"),
        (DENSE, POOLED, "without ColBERT vectors"),
        (EVERY, POOLED | {"input_type": "query"}, "these are queries"),
        (EVERY, POOLED | {"muvera": "query"}, "these are queries"),
        (EVERY, POOLED | {"return_tokens": True}, "exclude each other"),
        (DENSE, {"output_dtype": "int8", "input_type": "query", "return_tokens": True}, None),
        (EVERY, POOLED | {"output_dtype": "int8", "muvera": "document"}, None),
        (REST, {"return_tokens": True}, None),
    ],
)
def test_what_is_made_of_vectors_must_have_an_effect(outputs, asked, message) -> None:
    request = EmbedRequest([], outputs, **asked)
    if message is None:
        check_rendering(request)
    else:
        with pytest.raises(InvalidRequestError, match=message):
            check_rendering(request)
