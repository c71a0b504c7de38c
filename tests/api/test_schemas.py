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


@pytest.mark.parametrize(
    ("check", "refused"),
    [
        (lambda: check_texts(["a"] * 3, "sentences", 3), None),
        (lambda: check_texts(["a"] * 4, "input", 3), "list input holds 4 texts, and at most 3"),
        (lambda: check_passages("q", ["a"] * 2, "passages", SETTINGS), None),
        (lambda: check_passages("q", ["a"] * 3, "passages", SETTINGS), "MAX_RERANK_PASSAGES"),
        (lambda: check_texts([], "inputs", 3), "the list inputs is empty"),
        (lambda: check_passages(["q"], [], "passages", SETTINGS), "the list passages is empty"),
        # A blank query is told before all else.
        (lambda: check_passages("", [], "passages", SETTINGS), "the query is blank"),
        (lambda: check_passages(" \n", [], "passages", SETTINGS), "the query is blank"),
        (lambda: check_passages(["a", " "], [], "passages", SETTINGS), "the query is blank"),
        (lambda: check_truncation(truncate=True, side="left"), None),
        (lambda: check_truncation(truncate=False, side="right"), None),
        (lambda: check_truncation(truncate=False, side="left"), "truncation_side"),
    ],
)
def test_lists_queries_and_sides_are_checked_to_the_last_one(check, refused) -> None:
    if refused is None:
        check()
        return
    is_empty = "is empty" in refused or "is blank" in refused
    with pytest.raises(EmptyInputError if is_empty else InvalidRequestError, match=refused):
        check()


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
