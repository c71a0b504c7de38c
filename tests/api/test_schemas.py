"""Checks that every dialect shares: limits to the last one, and options without effect."""

from types import SimpleNamespace

import pytest

from smart_embedder.api.schemas import (
    check_passages,
    check_rerank_options,
    check_texts,
    check_truncation,
)
from smart_embedder.errors import EmptyInputError, InvalidRequestError
from smart_embedder.settings import Settings

SETTINGS = Settings(api_token=None, max_rerank_passages=2)


def test_as_many_as_the_limit_are_taken_and_one_more_is_not() -> None:
    check_texts(["a"] * 3, "sentences", 3)
    with pytest.raises(InvalidRequestError, match="list input holds 4 texts, and at most 3"):
        check_texts(["a"] * 4, "input", 3)
    check_passages("q", ["a"] * 2, "passages", SETTINGS)
    with pytest.raises(InvalidRequestError, match="MAX_RERANK_PASSAGES"):
        check_passages("q", ["a"] * 3, "passages", SETTINGS)


@pytest.mark.parametrize("query", ["", " \n", ["a", " "]])
def test_a_blank_query_is_told_before_all_else(query) -> None:
    with pytest.raises(EmptyInputError, match="the query is blank"):
        check_passages(query, [], "passages", SETTINGS)


def test_an_empty_list_is_empty() -> None:
    with pytest.raises(EmptyInputError, match="the list inputs is empty"):
        check_texts([], "inputs", 3)
    with pytest.raises(EmptyInputError, match="the list passages is empty"):
        check_passages(["q"], [], "passages", SETTINGS)


def test_a_side_needs_truncation() -> None:
    check_truncation(truncate=True, side="left")
    check_truncation(truncate=False, side="right")
    with pytest.raises(InvalidRequestError, match="truncation_side"):
        check_truncation(truncate=False, side="left")


def models(reranker: object = None, *, late: bool = False) -> SimpleNamespace:
    embedder = SimpleNamespace(name="bge-m3")
    return SimpleNamespace(embedder=embedder, reranker=reranker, late_interaction=late)


QWEN, BGE = (
    SimpleNamespace(name=name, reads_instruction=name == "qwen") for name in ("qwen", "bge")
)


@pytest.mark.parametrize(
    ("served", "options", "refused"),
    [
        (models(), {"instruction": "i", "weights": 1}, None),
        (models(late=True), {"weights": 1}, None),
        (
            models(late=True),
            {"instruction": "i"},
            "instruction has no effect with the reranker bge-m3",
        ),
        (models(QWEN), {"instruction": "i"}, None),
        (models(QWEN), {"weights": 1}, "weights has no effect with the reranker qwen"),
        (models(BGE), {"instruction": ""}, "instruction has no effect with the reranker bge,"),
        (models(BGE, late=True), {"weights": 0}, "weights has no effect with the reranker bge,"),
        (models(BGE), {}, None),
    ],
)
def test_an_option_that_the_reranker_would_ignore_is_refused(served, options, refused) -> None:
    if refused is None:
        check_rerank_options(served, **options)
    else:
        with pytest.raises(InvalidRequestError, match=refused):
            check_rerank_options(served, **options)
