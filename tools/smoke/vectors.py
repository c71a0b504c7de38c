"""Checks of vectors, of the warnings about truncated texts, and of rankings."""

import math
from typing import Any

from smart_embedder.api.answers import Embeddings, RerankResponse, SparseIndices
from tools.smoke.target import (
    EMBED,
    NO_RERANKER,
    RERANK,
    TOLERANCE,
    Skip,
    Target,
    expect,
    expect_that,
    expect_unit,
)

_TEXTS = ["What is hybrid search?", "A recipe for bread."]
_WORD = "search"
_LONGEST = 8192
_MIN_COSINE = 0.999
_SPARSE_ALONE = {"return_dense": False, "return_colbert": False}
_UNIT_DENSE_ALONE = {"return_sparse": False, "return_colbert": False, "normalize_dense": True}


def answer_is_complete(target: Target) -> None:
    """An answer names its models, tokens and times, and gives each text back in its place."""
    answer = target.embed(_TEXTS)
    expect("model_name", answer.model_name, answer.dense_model_name)
    expect("dense_model_name", answer.dense_model_name, target.health["dense_embedding_model"])
    expect("sparse_model_name", answer.sparse_model_name, target.health["model"])
    expect("warnings", answer.warnings, [])
    expect("texts", [(item.id, item.text) for item in answer.data], list(enumerate(_TEXTS)))
    usage = answer.usage
    expect("total_tokens", usage.total_tokens, usage.prompt_tokens)
    expect_that("prompt_tokens", usage.prompt_tokens > len(_TEXTS), "tokens", usage)


def three_kinds_come_together(target: Target) -> None:
    """One request gives dense, sparse and ColBERT vectors."""
    for item in target.embed(_TEXTS).data:
        expect_that("dense", item.embeddings.dense, "numbers", item.embeddings.dense)
        _weights_of(item.embeddings)
        vectors = item.embeddings.colbert or []
        widths = {len(vector) for vector in vectors}
        expect_that("widths of ColBERT vectors", len(widths) == 1, "one", widths)
        for vector in vectors:
            expect_unit("a ColBERT vector", vector)


def kinds_not_asked_for_are_null(target: Target) -> None:
    """A kind that is not asked for is null."""
    kinds = ("dense", "sparse", "colbert")
    for kind in kinds:
        found = _embed(target, **{f"return_{each}": each == kind for each in kinds})
        given = [each for each in kinds if getattr(found, each) is not None]
        expect("the kinds given", given, [kind])


def sparse_has_two_forms(target: Target) -> None:
    """Sparse weights are the same by token id and as indices and values."""
    weights = _weights_of(_embed(target, **_SPARSE_ALONE))
    both = _embed(target, **_SPARSE_ALONE, sparse_as_indices=True).sparse
    if not isinstance(both, SparseIndices):
        raise TypeError("sparse has no indices and values")
    expect("number of values", len(both.values), len(both.indices))
    listed = dict(zip(both.indices, both.values, strict=True))
    expect("different indices", len(listed), len(both.indices))
    for token in weights.keys() | listed.keys():
        one, other = weights.get(token, 0.0), listed.get(token, 0.0)
        alike = abs(one - other) <= TOLERANCE * max(1, abs(one))
        expect_that(f"the weight of token {token}", alike, one, other)


def dense_has_unit_length(target: Target) -> None:
    """bge-m3's dense vector has unit length without being asked."""
    embeddings = _embed(target, return_sparse=False, return_colbert=False)
    if target.health["model"] != target.health["dense_embedding_model"]:
        raise Skip("another model makes the dense vectors")
    expect_unit("dense", embeddings.dense or [])


def normalize_dense_gives_unit_length(target: Target) -> None:
    """With normalize_dense the dense vector has unit length."""
    expect_unit("dense", _embed(target, **_UNIT_DENSE_ALONE).dense or [])


def colbert_has_a_vector_for_each_token(target: Target) -> None:
    """ColBERT has one vector for each token but the first."""
    answer = target.embed(_TEXTS[:1], return_dense=False, return_sparse=False)
    vectors = answer.data[0].embeddings.colbert or []
    expect("number of vectors", len(vectors), answer.usage.prompt_tokens - 1)


def other_texts_change_nothing(target: Target) -> None:
    """A text has the same vector alone and among others."""
    alone = _embed(target, **_UNIT_DENSE_ALONE).dense or []
    texts = [*_TEXTS, "Others", "more words " * 9]
    among = target.embed(texts, **_UNIT_DENSE_ALONE).data[0].embeddings.dense or []
    cosine = math.fsum(a * b for a, b in zip(alone, among, strict=True))
    expect_that("their cosine", cosine > _MIN_COSINE, f"above {_MIN_COSINE}", cosine)


def both_paths_answer(target: Target) -> None:
    """/embeddings answers as /embeddings/ does."""
    bare, full = (
        target.embed(_TEXTS[:1], path, return_colbert=False).usage
        for path in ("/embeddings", EMBED)
    )
    expect("usage", bare, full)


def long_texts_are_cut_and_reported(target: Target) -> None:
    """A text longer than the model reads is cut, and the warning counts its tokens exactly."""
    target.require_healthy()
    max_tokens = target.health["max_input_length"]
    if max_tokens > _LONGEST:
        raise Skip(f"it would take a text of more than {_LONGEST} tokens")
    # Two short texts show how many tokens a word has, and how many there are besides words.
    few, more = (_count_tokens(target, _words(count)) for count in (1, 5))
    original = int(few + (max_tokens - 1) * (more - few) / 4)
    answer = target.embed([_TEXTS[0], _words(max_tokens)], **_SPARSE_ALONE)
    expect("number of warnings", len(answer.warnings), 1)
    for name, expected in {
        "code": "input_truncated",
        "severity": "warning",
        "target": {"field": "sentences", "index": 1, "pointer": "/sentences/1"},
        "details": {
            "model": answer.sparse_model_name,
            "max_tokens": max_tokens,
            "original_tokens": original,
            "truncated_tokens": original - max_tokens,
            "truncation_side": "end",
        },
    }.items():
        expect(name, answer.warnings[0].model_dump(exclude_none=True)[name], expected)
    short = _count_tokens(target, _TEXTS[0])
    expect("prompt_tokens", answer.usage.prompt_tokens, short + max_tokens)


def _embed(target: Target, **options: bool) -> Embeddings:
    return target.embed(_TEXTS[:1], **options).data[0].embeddings


def _weights_of(embeddings: Embeddings) -> dict[int, float]:
    sparse = embeddings.sparse
    if not isinstance(sparse, dict):
        raise TypeError("sparse has no weights by token id")
    expect_that("token ids", all(map(str.isdecimal, sparse)), "numbers", list(sparse))
    smallest = min(sparse.values())
    expect_that("weights", smallest > 0, "above 0", smallest)
    return {int(token): weight for token, weight in sparse.items()}


def _words(count: int) -> str:
    return " ".join([_WORD] * count)


def _count_tokens(target: Target, text: str) -> int:
    return target.embed([text], **_SPARSE_ALONE).usage.prompt_tokens


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
    answer_is_complete,
    three_kinds_come_together,
    kinds_not_asked_for_are_null,
    sparse_has_two_forms,
    dense_has_unit_length,
    normalize_dense_gives_unit_length,
    colbert_has_a_vector_for_each_token,
    other_texts_change_nothing,
    both_paths_answer,
    long_texts_are_cut_and_reported,
    rerank_orders_by_falling_score,
    normalize_keeps_the_order,
    blank_query_is_400,
    disabled_reranker_is_503,
)
