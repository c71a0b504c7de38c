"""Checks of the three kinds of vectors, and of what is said of texts that were cut."""

import math
from collections.abc import Sequence
from typing import Any

from tools.smoke.expectations import (
    TOLERANCE,
    Skip,
    expect,
    expect_finite,
    expect_keys,
    expect_that,
    expect_unit,
)
from tools.smoke.target import EMBED, Target

_TEXTS = ["What is hybrid search?", "A recipe for bread."]
_WORD = "search"
_ANSWER = [
    "data",
    "model_name",
    "dense_model_name",
    "sparse_model_name",
    "colbert_model_name",
    "processing_time_ms",
    "warnings",
    "usage",
    "timings_ms",
]
_LONGEST = 8192
_ALIKE = 0.999


def answer_is_complete(target: Target) -> None:
    """An answer names its models, tokens and times, and gives each text back in its place."""
    answer = target.work(EMBED, {"sentences": _TEXTS})
    expect_keys("the answer", answer, _ANSWER)
    expect_keys("timings_ms", answer["timings_ms"], {"tokenize", "queue", "inference", "total"})
    expect("model_name", answer["model_name"], answer["dense_model_name"])
    expect("dense_model_name", answer["dense_model_name"], target.health["dense_embedding_model"])
    expect("sparse_model_name", answer["sparse_model_name"], target.health["model"])
    expect("warnings", answer["warnings"], [])
    expect(
        "texts", [(item["id"], item["text"]) for item in answer["data"]], list(enumerate(_TEXTS))
    )
    usage = answer["usage"]
    expect("total_tokens", usage["total_tokens"], usage["prompt_tokens"])
    expect_that("prompt_tokens", usage["prompt_tokens"] > len(_TEXTS), "tokens", usage)


def three_kinds_come_together(target: Target) -> None:
    """One request gives dense, sparse and ColBERT vectors."""
    for item in target.work(EMBED, {"sentences": _TEXTS})["data"]:
        kinds = item["embeddings"]
        expect_finite("dense", kinds["dense"])
        _expect_weights(kinds["sparse"])
        widths = {len(vector) for vector in kinds["colbert"]}
        expect_that("widths of ColBERT vectors", len(widths) == 1, "one", widths)
        for vector in kinds["colbert"]:
            expect_unit("a ColBERT vector", vector)


def kinds_not_asked_for_are_null(target: Target) -> None:
    """A kind that is not asked for is null."""
    kinds = ("dense", "sparse", "colbert")
    for kind in kinds:
        wanted = {f"return_{each}": each == kind for each in kinds}
        found = _embed(target, **wanted)
        expect("the kinds given", [each for each in kinds if found[each] is not None], [kind])


def sparse_has_two_forms(target: Target) -> None:
    """Sparse weights are the same by token id and as indices and values."""
    only = {"return_dense": False, "return_colbert": False}
    weights = _expect_weights(_embed(target, **only)["sparse"])
    both = _embed(target, **only, sparse_as_indices=True)["sparse"]
    expect_keys("sparse", both, {"indices", "values"})
    expect("number of values", len(both["values"]), len(both["indices"]))
    listed = dict(zip(both["indices"], both["values"], strict=True))
    expect("different indices", len(listed), len(both["indices"]))
    for token in weights.keys() | listed.keys():
        one, other = weights.get(token, 0.0), listed.get(token, 0.0)
        alike = abs(one - other) <= TOLERANCE * max(1, abs(one))
        expect_that(f"the weight of token {token}", alike, one, other)


def dense_has_unit_length(target: Target) -> None:
    """bge-m3's dense vector has unit length without being asked."""
    dense = _embed(target, return_sparse=False, return_colbert=False)["dense"]
    if target.health["model"] != target.health["dense_embedding_model"]:
        raise Skip("another model makes the dense vectors")
    expect_unit("dense", dense)


def normalize_dense_gives_unit_length(target: Target) -> None:
    """With normalize_dense the dense vector has unit length."""
    wanted = {"return_sparse": False, "return_colbert": False, "normalize_dense": True}
    expect_unit("dense", _embed(target, **wanted)["dense"])


def colbert_has_a_vector_for_each_token(target: Target) -> None:
    """ColBERT has one vector for each token but the first."""
    wanted = {"return_dense": False, "return_sparse": False}
    answer = target.work(EMBED, {"sentences": _TEXTS[:1]} | wanted)
    count = len(answer["data"][0]["embeddings"]["colbert"])
    expect("number of vectors", count, answer["usage"]["prompt_tokens"] - 1)


def company_changes_nothing(target: Target) -> None:
    """A text has the same vector alone and among others."""
    wanted = {"return_sparse": False, "return_colbert": False, "normalize_dense": True}
    alone = _embed(target, **wanted)["dense"]
    others = [*_TEXTS, "Others", "bear it company " * 9]
    among = target.work(EMBED, {"sentences": others} | wanted)["data"][0]["embeddings"]["dense"]
    likeness = math.fsum(a * b for a, b in zip(alone, among, strict=True))
    expect_that("their cosine", likeness > _ALIKE, f"above {_ALIKE}", likeness)


def both_paths_answer(target: Target) -> None:
    """/embeddings answers as /embeddings/ does."""
    body = {"sentences": _TEXTS[:1], "return_colbert": False}
    first = target.work("/embeddings", body)["usage"]
    expect("usage", first, target.work(EMBED, body)["usage"])


def long_texts_are_cut_and_reported(target: Target) -> None:
    """A text longer than the model reads is cut, and the warning counts its tokens exactly."""
    target.require_healthy()
    most = target.health["max_input_length"]
    if most > _LONGEST:
        raise Skip(f"it would take a text of more than {_LONGEST} tokens")
    # By two short texts, how many tokens a word is and how many there are besides words.
    few, more = _tokens_of_words(target, 1), _tokens_of_words(target, 5)
    each = (more - few) / 4
    answer = target.work(EMBED, _sparse_alone([_TEXTS[0], _words(most)]))
    expect("number of warnings", len(answer["warnings"]), 1)
    (warning,) = answer["warnings"]
    original = int(few + (most - 1) * each)
    for name, expected in {
        "code": "input_truncated",
        "severity": "warning",
        "target": {"field": "sentences", "index": 1, "pointer": "/sentences/1"},
        "details": {
            "model": answer["sparse_model_name"],
            "max_tokens": most,
            "original_tokens": original,
            "truncated_tokens": original - most,
            "truncation_side": "end",
        },
    }.items():
        expect(name, warning[name], expected)
    short = target.work(EMBED, _sparse_alone(_TEXTS[:1]))["usage"]["prompt_tokens"]
    expect("prompt_tokens", answer["usage"]["prompt_tokens"], short + most)


def _embed(target: Target, **wanted: bool) -> Any:
    return target.work(EMBED, {"sentences": _TEXTS[:1]} | wanted)["data"][0]["embeddings"]


def _expect_weights(sparse: dict[str, float]) -> dict[int, float]:
    expect_that("token ids", all(map(str.isdecimal, sparse)), "numbers", list(sparse))
    weights = list(sparse.values())
    expect_finite("weights", weights)
    expect_that("weights", min(weights) > 0, "above 0", min(weights))
    return {int(token): weight for token, weight in sparse.items()}


def _sparse_alone(texts: Sequence[str]) -> dict[str, Any]:
    return {"sentences": list(texts), "return_dense": False, "return_colbert": False}


def _words(count: int) -> str:
    return " ".join([_WORD] * count)


def _tokens_of_words(target: Target, count: int) -> int:
    usage = target.work(EMBED, _sparse_alone([_words(count)]))["usage"]
    return int(usage["prompt_tokens"])


CHECKS = (
    answer_is_complete,
    three_kinds_come_together,
    kinds_not_asked_for_are_null,
    sparse_has_two_forms,
    dense_has_unit_length,
    normalize_dense_gives_unit_length,
    colbert_has_a_vector_for_each_token,
    company_changes_nothing,
    both_paths_answer,
    long_texts_are_cut_and_reported,
)
