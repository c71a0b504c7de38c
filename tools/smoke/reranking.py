"""Checks of POST /rerank."""

import math
from typing import Any

from smart_embedder.api.answers import RerankResponse
from tools.smoke.expectations import TOLERANCE, Skip, expect, expect_that
from tools.smoke.target import NO_RERANKER, RERANK, Target

_QUERY = "What is hybrid search?"
_PASSAGES = [
    "A recipe for bread.",
    "Hybrid search joins meaning and exact words in one ranking.",
    "A recipe for bread.",
    "The sea in winter.",
]
_BODY: dict[str, Any] = {"query": _QUERY, "passages": _PASSAGES}


def rerank_orders_by_falling_score(target: Target) -> None:
    """Every passage comes back once, by falling score; equal scores keep the request's order."""
    target.require_reranker()
    answer = target.rerank(**_BODY)
    expect("warnings", answer.warnings, [])
    scores = [result.score for result in answer.results]
    order = [(-result.score, result.index) for result in answer.results]
    expect_that("scores", order == sorted(order), "falling, equal ones in order", scores)
    indices = [result.index for result in answer.results]
    expect("indices", sorted(indices), list(range(len(_PASSAGES))))
    passages = [result.passage for result in answer.results]
    expect("passages", passages, [_PASSAGES[index] for index in indices])


def normalize_keeps_the_order(target: Target) -> None:
    """`normalize` makes logits probabilities, and changes no score that is no logit."""
    target.require_reranker()
    raw = _scores(target.rerank(**_BODY))
    normal = _scores(target.rerank(**_BODY, normalize=True))
    sigmoids = {index: 1 / (1 + math.exp(-score)) for index, score in raw.items()}
    same = any(
        all(math.isclose(each[i], normal[i], abs_tol=TOLERANCE) for i in normal)
        for each in (raw, sigmoids)
    )
    expect_that("scores", same, f"{sigmoids} or {raw}", normal)


def blank_query_is_400(target: Target) -> None:
    """A blank query, and an empty list of passages, is 400."""
    for body in (_BODY | {"query": "  "}, _BODY | {"passages": []}):
        expect("the code", target.refused(RERANK, body, 400).code, "empty_input")


def disabled_reranker_is_503(target: Target) -> None:
    """With RERANKER_MODEL=none, reranking is 503 and says so."""
    if target.health["reranker_model"] != NO_RERANKER:
        raise Skip("there is a reranker")
    expect("the code", target.refused(RERANK, _BODY, 503).code, "reranker_disabled")


def _scores(answer: RerankResponse) -> dict[int, float]:
    return {result.index: result.score for result in answer.results}


CHECKS = (
    rerank_orders_by_falling_score,
    normalize_keeps_the_order,
    blank_query_is_400,
    disabled_reranker_is_503,
)
