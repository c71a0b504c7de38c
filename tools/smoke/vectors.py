"""Checks of the three kinds of vectors, and of the warnings about truncated texts."""

import math

from smart_embedder.api.answers import Embeddings, SparseIndices
from tools.smoke.expectations import TOLERANCE, Skip, expect, expect_that, expect_unit
from tools.smoke.target import EMBED, Target

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
)
