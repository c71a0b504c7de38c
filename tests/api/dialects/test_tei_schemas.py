"""The bodies of text-embeddings-inference: which shapes of them are read, and as what."""

from typing import Any

import pytest
from pydantic import ValidationError

from smart_embedder.api.dialects.tei_schemas import (
    DecodeRequest,
    EmbedRequest,
    PredictRequest,
    RerankTextsRequest,
)
from smart_embedder.engine.records import DENSE, TruncationOptions


@pytest.mark.parametrize(
    ("inputs", "single", "pairs"),
    [
        ("a", True, [("a", None)]),
        (["a"], True, [("a", None)]),
        (["a", "b"], True, [("a", "b")]),
        ([["a"], ["b", "c"]], False, [("a", None), ("b", "c")]),
        ([["a"]], False, [("a", None)]),
        ([], False, []),
    ],
)
def test_a_text_a_pair_or_a_list_of_them_is_classified(inputs, single, pairs) -> None:
    body = PredictRequest(inputs=inputs)
    assert (body.is_single, body.pairs) == (single, pairs)


@pytest.mark.parametrize(
    "inputs", [7, None, {}, ["a", "b", "c"], ["a", 7], ["a", ["b"]], [[]], [["a", "b", "c"]], [[7]]]
)
def test_what_is_no_text_or_pair_is_refused(inputs: Any) -> None:
    with pytest.raises(ValidationError, match="send a text, a pair of texts, or a list of lists"):
        PredictRequest(inputs=inputs)


@pytest.mark.parametrize(
    ("ids", "lists"),
    [
        *(([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), ([], []), ([[]], [[]])),
        *(([0], [[0]]), ([2**32 - 1], [[2**32 - 1]]), ([-1], None), ([2**32], None)),
    ],
)
def test_ids_of_32_bits_are_one_list_or_several(ids, lists) -> None:
    if lists is None:
        with pytest.raises(ValidationError):
            DecodeRequest(ids=ids)
    else:
        assert DecodeRequest(ids=ids).ids == lists


@pytest.mark.parametrize(
    ("fields", "truncation"),
    [
        ({}, TruncationOptions(False, "right")),
        ({"truncate": True}, TruncationOptions(True, "right")),
        ({"truncate": True, "truncation_direction": "Left"}, TruncationOptions(True, "left")),
    ],
)
def test_a_text_is_cut_where_that_is_asked_for(fields, truncation) -> None:
    """And not by default, as everywhere else here."""
    assert RerankTextsRequest(query="a", texts=["b"], **fields).truncation == truncation
    body = EmbedRequest(inputs="a", prompt_name="query", **fields)
    asked = body.request(["a"])
    assert (asked.texts, asked.outputs, asked.truncation) == (["a"], DENSE, truncation)
    assert (asked.prompt_name, asked.normalize_dense) == ("query", True)
    assert body.inputs == ["a"]
