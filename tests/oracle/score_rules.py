"""The rules of the truth for scores: reranking in every dialect, and labels."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.oracle.rules import (
    BOTH,
    CUTS,
    ELSEWHERE,
    INSTRUCTION,
    LONG,
    QUERY,
    SHORT,
    SIDES,
    TEI_TOGETHER,
    Body,
    Rule,
    Served,
    first,
    reading,
    texts_of,
    usage,
)
from tests.oracle.truth import (
    BgeReranker,
    QwenReranker,
    Reading,
    RefusedError,
    Vectors,
    fused,
    sigmoid,
)


@dataclass(slots=True)
class Scored:
    """The scores of passages, and what was read for them."""

    scores: list[float] = field(default_factory=list)
    parts: list[Body] = field(default_factory=list)
    tokens: int = 0
    # The passages that were cut, by their places.
    cut: list[int] = field(default_factory=list)


def _score(
    served: Served, pairs: list[tuple[str, str]], how: Reading, body: Body, *, raw: bool
) -> Scored:
    """Of each pair: the model's own score, or with `raw` false a probability."""
    found, instruction = Scored(), body.get("instruction")
    if instruction is not None and not isinstance(served.reranker, QwenReranker):
        raise RefusedError
    if body.get("weights") is not None and served.reranker is not None:
        raise RefusedError
    if served.reranker is None:
        return _late(served, pairs, how, body, raw=raw)
    for index, (query, passage) in enumerate(pairs):
        logit, ids = served.reranker.logit(query, passage, how, instruction)
        is_raw = raw and isinstance(served.reranker, BgeReranker)
        found.scores.append(logit if is_raw else sigmoid(logit))
        found.tokens += len(ids.read)
        if ids.original > ids.limit:
            found.cut.append(index)
    return found


def _late(
    served: Served, pairs: list[tuple[str, str]], how: Reading, body: Body, *, raw: bool
) -> Scored:
    found = Scored()
    weights = dict.fromkeys(("dense", "sparse", "colbert"), 1.0) | (body.get("weights") or {})
    if not any(weights.values()):
        raise RefusedError
    asked: dict[str, Vectors] = {}
    for index, (query, passage) in enumerate(pairs):
        one = served.m3.vectors(query, Reading(truncate=how.truncate))
        other = served.m3.vectors(passage, how)
        score, parts = fused(one, other, weights)
        found.scores.append(score if raw else sigmoid(score))
        found.parts.append({kind: np.asarray(part) for kind, part in parts.items()})
        if query not in asked:
            asked[query] = one
            found.tokens += len(one.ids.read)
        found.tokens += len(other.ids.read)
        if other.ids.original > other.ids.limit:
            found.cut.append(index)
    return found


def _order(found: Scored) -> list[int]:
    return sorted(range(len(found.scores)), key=lambda index: -found.scores[index])


def _native_rerank(served: Served, question: Any) -> Body:
    body = question.body
    if body.get("if_vector_space"):
        raise RefusedError
    how = reading(body)
    pairs = [(body["query"], passage) for passage in body["passages"]]
    # A sigmoid is only for the logits of cross-encoders.
    raw = not body.get("normalize") or served.reranker is None
    found = _score(served, pairs, how, body, raw=raw)
    results = []
    for index in _order(found):
        result: Body = {"index": index, "passage": body["passages"][index]}
        result["score"] = np.asarray(found.scores[index])
        if found.parts:
            result["parts"] = found.parts[index]
        results.append(result)
    return {
        "results": results,
        "model_name": served.ranking_model.name,
        "usage": usage(found.tokens),
        "warnings": [f"/passages/{index}" for index in found.cut],
    }


def _documents(served: Served, question: Any) -> Body:
    body = question.body
    if body.get("rank_fields") not in (None, ["text"], []):
        raise RefusedError
    texts = texts_of(body["documents"])
    how = reading(body)
    raw = first(body, "use_activation", "activation") is False
    query = texts_of(body["query"])[0]
    found = _score(served, [(query, text) for text in texts], how, body, raw=raw)
    order = _order(found)[: first(body, "top_n", "top_k") or None]
    results: list[Body] = [
        {"index": index, "relevance_score": np.asarray(found.scores[index])} for index in order
    ]
    told = bool(body.get("return_documents"))
    shown = [
        each | ({"document": {"text": texts[each["index"]]}} if told else {}) for each in results
    ]
    answer: Body = {
        "model": served.ranking_model.name,
        "results": shown,
        "meta": {
            "api_version": {"version": "2"},
            "billed_units": {"search_units": 1},
            "tokens": {"input_tokens": found.tokens},
        },
        "usage": usage(found.tokens),
    }
    if {"top_k", "truncation"} & body.keys():
        answer["object"] = "list"
        answer["data"] = [
            each | ({"document": texts[each["index"]]} if told else {}) for each in results
        ]
    return answer


def _ranks(served: Served, question: Any) -> list[Body]:
    body = question.body
    how = reading(body, cut=False)
    pairs = [(body["query"], text) for text in body["texts"]]
    found = _score(served, pairs, how, body, raw=bool(body.get("raw_scores")))
    return [
        {"index": index, "score": np.asarray(found.scores[index])}
        | ({"text": body["texts"][index]} if body.get("return_text") else {})
        for index in _order(found)
    ]


def _vllm_scores(served: Served, question: Any) -> Body:
    body = question.body
    left, right = texts_of(body["text_1"]), texts_of(body["text_2"])
    left = left * len(right) if len(left) == 1 else left
    raw = first(body, "use_activation", "activation") is False
    found = _score(served, list(zip(left, right, strict=True)), reading(body), body, raw=raw)
    data = [
        {"index": index, "object": "score", "score": np.asarray(score)}
        for index, score in enumerate(found.scores)
    ]
    answer = {"object": "list", "data": data, "usage": usage(found.tokens)}
    return answer | {"model": served.ranking_model.name}


def _predictions(served: Served, question: Any) -> Any:
    body = question.body
    if not isinstance(served.reranker, BgeReranker):
        raise RefusedError
    how, inputs = reading(body, cut=False), body["inputs"]
    single = isinstance(inputs, str) or isinstance(inputs[0], str)
    pairs = [[inputs]] if isinstance(inputs, str) else [inputs] if single else inputs
    answer = []
    for text, *other in pairs:
        logit, _ = served.reranker.logit(text, other[0] if other else None, how, None)
        score = np.asarray(logit if body.get("raw_scores") else sigmoid(logit))
        answer.append([{"score": score, "label": "LABEL_0"}])
    return answer[0] if single else answer


_SCORE_OPTIONS: dict[str, tuple[Any, ...]] = {
    "use_activation": BOTH,
    "activation": BOTH,
    "instruction": (INSTRUCTION,),
    "truncate": CUTS,
    "truncation_side": SIDES,
    "max_tokens_per_doc": (1, 3, 100),
    "model": (),
}
SCORE_RULES: dict[str, Rule] = {
    "RerankResponse": Rule(
        ("query", "passages"),
        tuple({"query": QUERY, "passages": texts} for texts in (SHORT, LONG)),
        {
            "normalize": BOTH,
            "instruction": (INSTRUCTION,),
            **{f"weights.{kind}": (0, 0.5, 2) for kind in ("dense", "sparse", "colbert")},
            "truncate": BOTH,
            "truncation_side": SIDES,
            "if_vector_space": (ELSEWHERE,),
            "model": (),
        },
        _native_rerank,
        frozenset({"processing_time_ms", "timings_ms", "vector_space", "precision"}),
    ),
    "DocumentsResponse": Rule(
        ("query", "documents"),
        (
            *({"query": QUERY, "documents": texts} for texts in (SHORT, LONG)),
            {"query": {"text": QUERY}, "documents": [{"text": each} for each in SHORT]},
        ),
        _SCORE_OPTIONS
        | {
            "top_n": (0, 1, 2),
            "top_k": (0, 1, 2),
            "return_documents": BOTH,
            "truncation": BOTH,
            "rank_fields": (["text"], ["title"]),
            "max_doc_length": (1, 3, 100),
        },
        _documents,
        frozenset({"id"}),
        (
            {"top_k": 2, "return_documents": True},
            {"truncation": True, "return_documents": True},
            *({"max_tokens_per_doc": 3, "truncation_side": side} for side in SIDES),
        ),
    ),
    "Ranks": Rule(
        ("query", "texts"),
        tuple({"query": QUERY, "texts": texts} for texts in (SHORT, LONG)),
        {
            "truncate": BOTH,
            "truncation_direction": SIDES,
            "raw_scores": BOTH,
            "return_text": BOTH,
        },
        _ranks,
        together=TEI_TOGETHER,
        of_reranker=True,
    ),
    "ScoreResponse": Rule(
        ("text_1", "text_2"),
        (
            {"text_1": QUERY, "text_2": SHORT},
            {"text_1": QUERY, "text_2": LONG},
            {"text_1": ["sea", "sea", QUERY], "text_2": SHORT},
            {"text_1": QUERY, "text_2": "bread"},
        ),
        _SCORE_OPTIONS,
        _vllm_scores,
        frozenset({"id", "created"}),
    ),
    "Predictions": Rule(
        ("inputs",),
        (
            {"inputs": "river"},
            {"inputs": ["river", "bread"]},
            {"inputs": [["river", "bread"], ["memory"]]},
            {"inputs": [["bread", LONG[0]], [LONG[0]]]},
        ),
        {"truncate": BOTH, "truncation_direction": SIDES, "raw_scores": BOTH},
        _predictions,
        together=TEI_TOGETHER,
        of_reranker=True,
    ),
}
