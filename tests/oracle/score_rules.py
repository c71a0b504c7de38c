"""Rules for scores: reranking in every dialect."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tests.oracle.rules import (
    ALL_TOKENS,
    BOTH,
    CUTS,
    ELSEWHERE,
    INSTRUCTION,
    LONG,
    MIXED,
    QUERY,
    SHORT,
    SIDES,
    TEI_TOGETHER,
    Body,
    Rule,
    Served,
    first,
    is_below_limit,
    read_options,
    shown,
    texts_of,
    usage,
)
from tests.oracle.truth import (
    BgeReranker,
    Picture,
    QwenReranker,
    ReadingOptions,
    RefusedError,
    fused,
    sigmoid,
)


@dataclass(slots=True)
class Scored:
    """The scores of passages, and the tokens that were read."""

    scores: list[float] = field(default_factory=list)
    # The scores before a sigmoid, which decide the order.
    raw: list[float] = field(default_factory=list)
    parts: list[Body] = field(default_factory=list)
    tokens: int = 0
    # The indices of passages that were cut.
    cut: list[int] = field(default_factory=list)


def score(
    served: Served,
    query: str,
    passages: list[str | Picture],
    options: ReadingOptions,
    body: Body,
    *,
    raw: bool,
) -> Scored:
    """Score the passages: by the model's own score, or with `raw` false by a probability."""
    found, instruction = Scored(), first(body, "instruction", "instruct")
    if instruction is not None and not isinstance(served.reranker, QwenReranker):
        raise RefusedError
    if body.get("weights") is not None and served.reranker is not None:
        raise RefusedError
    if served.reranker is None:
        return _late(served, query, passages, options, body, raw=raw)
    for index, passage in enumerate(passages):
        if isinstance(passage, Picture):
            raise RefusedError
        logit, ids = served.reranker.logit(query, passage, options, instruction)
        is_raw = raw and isinstance(served.reranker, BgeReranker)
        found.raw.append(logit)
        found.scores.append(logit if is_raw else sigmoid(logit))
        found.tokens += len(ids.read)
        if ids.original > ids.limit:
            found.cut.append(index)
    return found


def _late(
    served: Served,
    query: str,
    passages: list[str | Picture],
    options: ReadingOptions,
    body: Body,
    *,
    raw: bool,
) -> Scored:
    query_vectors = served.m3.vectors(query, ReadingOptions(truncate=options.truncate))
    found = Scored(tokens=len(query_vectors.ids.read))
    given = body.get("weights") or {}
    weights = {kind: given.get(kind, 1.0) for kind in served.m3.kinds}
    if not any(weights.values()):
        raise RefusedError
    for index, passage in enumerate(passages):
        vectors = served.m3.vectors(passage, options)
        fusion, parts = fused(query_vectors, vectors, weights)
        found.raw.append(fusion)
        found.scores.append(fusion if raw else sigmoid(fusion))
        unmade = dict.fromkeys(("sparse", "colbert"))
        found.parts.append(unmade | {kind: np.asarray(part) for kind, part in parts.items()})
        found.tokens += len(vectors.ids.read)
        if vectors.ids.original > vectors.ids.limit:
            found.cut.append(index)
    return found


def order(found: Scored) -> list[int]:
    return sorted(range(len(found.scores)), key=lambda index: -found.raw[index])


def _native_rerank(served: Served, question: Any) -> Body:
    body = question.body
    if body.get("if_vector_space"):
        raise RefusedError
    options = read_options(body)
    # Only the logits of cross-encoders are normalized by a sigmoid.
    raw = not body.get("normalize") or served.reranker is None
    passages = texts_of(body["passages"])
    found = score(served, body["query"], passages, options, body, raw=raw)
    results = []
    for index in order(found):
        result: Body = {"index": index, "passage": shown(passages[index])}
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
    options = read_options(body)
    activation = first(body, "use_activation", "activation")
    if (activation and body.get("raw_scores")) or is_below_limit(body):
        raise RefusedError
    if (body.get("max_chunks_per_doc") or 1) > 1 and first(body, "truncate", "truncation") is None:
        options = replace(options, truncate=False)
    raw = activation is False or bool(body.get("raw_scores"))
    query = texts_of(body["query"])[0]
    found = score(served, query, texts, options, body, raw=raw)
    ranking = order(found)[: first(body, "top_n", "top_k") or None]
    results: list[Body] = [
        {"index": index, "relevance_score": np.asarray(found.scores[index])} for index in ranking
    ]
    with_texts = bool(body.get("return_documents"))
    answer: Body = {
        "model": served.ranking_model.name,
        "results": [
            result | ({"document": {"text": shown(texts[result["index"]])}} if with_texts else {})
            for result in results
        ],
        "meta": {
            "api_version": {"version": "2"},
            "billed_units": {"search_units": 1},
            "tokens": {"input_tokens": found.tokens},
        },
        "usage": usage(found.tokens),
    }
    answer["object"] = "list"
    answer["data"] = [
        result | ({"document": shown(texts[result["index"]])} if with_texts else {})
        for result in results
    ]
    return answer


def _ranks(served: Served, question: Any) -> list[Body]:
    body = question.body
    options = read_options(body)
    raw = bool(body.get("raw_scores"))
    found = score(served, body["query"], body["texts"], options, body, raw=raw)
    return [
        {"index": index, "score": np.asarray(found.scores[index])}
        | ({"text": body["texts"][index]} if body.get("return_text") else {})
        for index in order(found)
    ]


SCORE_RULES: dict[str, Rule] = {
    "RerankResponse": Rule(
        ("query", "passages"),
        tuple({"query": QUERY, "passages": texts} for texts in (SHORT, LONG, MIXED)),
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
        frozenset({"processing_time_ms", "timings_ms", "vector_space"}),
    ),
    "DocumentsResponse": Rule(
        ("query", "documents"),
        (
            *({"query": QUERY, "documents": texts} for texts in (SHORT, LONG, MIXED)),
            {"query": {"text": QUERY}, "documents": [{"text": text} for text in SHORT]},
        ),
        {
            "use_activation": BOTH,
            "activation": BOTH,
            "raw_scores": BOTH,
            "instruction": (INSTRUCTION,),
            "instruct": (INSTRUCTION,),
            "truncate_prompt_tokens": (-1, 3, ALL_TOKENS),
            "max_chunks_per_doc": (1, 10),
            "truncate": CUTS,
            "truncation_side": SIDES,
            "max_tokens_per_doc": (1, 3, 100),
            "model": (),
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
}
