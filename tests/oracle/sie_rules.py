"""Rules for SIE's API: vectors, scores and spans, in JSON and in MessagePack."""

from dataclasses import replace
from typing import Any

import numpy as np

from smart_embedder.vectors import MuveraSide
from tests.oracle.pictures import PICTURES
from tests.oracle.rules import (
    BOTH,
    INSTRUCTION,
    LONG,
    QUERY,
    SHORT,
    Body,
    Rule,
    Served,
    texts_of,
)
from tests.oracle.score_rules import order, score
from tests.oracle.span_rules import found_spans
from tests.oracle.truth import M3, Ids, ReadingOptions, RefusedError, muvera, quantized
from tests.support.formats import JSON, MESSAGE_PACK

_TYPES = ("dense", "sparse", "multivector")
_DTYPES = ("float32", "float16", "int8", "uint8", "binary", "ubinary")
_BODIES = tuple(
    {"items": [{"id": text[:9], "text": text} for text in texts]} for texts in (SHORT, LONG)
)
_MIXED = [
    {"id": "a", "text": SHORT[0]},
    *({"id": url[-9:], "images": [{"data": url.partition(",")[2]}]} for url in PICTURES),
]


def _params(question: Any) -> tuple[Body, Body]:
    params = question.body.get("params") or {}
    return params, params.get("options") or {}


def _vectors(served: Served, question: Any) -> Body:
    params, options = _params(question)
    types = params.get("output_types") or ["dense"]
    side: MuveraSide = "query" if options.get("is_query") else "document"
    if options.get("muvera"):  # It takes no parameters.
        raise RefusedError
    condenses = options.get("muvera") is not None and "dense" in types
    if options.get("normalize") is False and isinstance(served.dense_model, M3):
        raise RefusedError
    only_others = condenses or "dense" not in types
    if params.get("instruction") and served.dense is not None and only_others:
        raise RefusedError
    reading = ReadingOptions(_prompt(served, params.get("instruction"), side))
    plain = reading if served.dense is None else replace(reading, prompt="")
    dtype, items, tokens = params.get("output_dtype") or "float32", [], 0
    for item, text in zip(question.body["items"], texts_of(question.body["items"]), strict=True):
        read, encoded = list[Ids](), {"id": item["id"]}
        if "dense" in types and not condenses:
            found = served.dense_model.vectors(text, reading)
            dense = found.raw if options.get("normalize") is False else found.dense
            encoded["dense"] = {"dims": len(dense)} | _numbers(dense, dtype)
            read.append(found.ids)
        if condenses or {"sparse", "multivector"} & {*types}:
            found = served.token_model.vectors(text, plain)
            if served.dense is not None or not read:
                read.append(found.ids)
            encoded |= _others(found, types, dtype)
            if condenses:
                vector = muvera(found.colbert, side)
                encoded["dense"] = {"dims": len(vector)} | _numbers(vector, dtype)
        tokens += sum(len(ids.read) for ids in read)
        items.append(encoded)
    model = served.dense_model.name
    return {"model": model, "items": items, "usage": {"input_tokens": tokens}}


def _others(found: Any, types: list[str], dtype: str) -> Body:
    encoded: Body = {}
    if "sparse" in types:
        weights = np.array([found.sparse[token] for token in sorted(found.sparse)], np.float32)
        indices = np.array(sorted(found.sparse))
        converted = _numbers(weights, "float16" if dtype == "float16" else "float32")
        encoded["sparse"] = {"dims": None, "indices": indices} | converted
    if "multivector" in types:
        count, width = found.colbert.shape
        shape = {"num_tokens": count, "token_dims": width}
        encoded["multivector"] = shape | _numbers(found.colbert, dtype)
    return encoded


def _prompt(served: Served, instruction: str | None, side: str) -> str:
    if instruction is None:
        others = ("passage", "corpus") if side == "document" else ()
        return served.prompt_for(side, *others)
    begin, line, end = served.prompt_for("query").rpartition("\n")
    if side == "query" and begin.startswith("Instruct: "):
        return f"Instruct: {instruction}{line}{end}"
    return f"{instruction} "


def _numbers(vectors: Any, dtype: str) -> Body:
    if dtype == "uint8":
        low, high = vectors.min(-1, keepdims=True), vectors.max(-1, keepdims=True)
        values = np.rint((vectors - low) / (high - low) * 255).astype(np.uint8)
    else:
        values, _ = quantized(vectors, "ubinary" if dtype == "binary" else dtype)
    return {"dtype": "binary" if dtype == "ubinary" else dtype, "values": values}


def _scores(served: Served, question: Any) -> Body:
    body = question.body
    texts = texts_of(body["items"])
    found = score(served, body["query"]["text"], texts, ReadingOptions(), body, raw=False)
    scores = [
        {
            "item_id": body["items"][index].get("id") or f"item-{index}",
            "score": np.asarray(found.scores[index]),
            "rank": rank,
        }
        for rank, index in enumerate(order(found))
    ]
    return {
        "model": served.ranking_model.name,
        "query_id": body["query"].get("id"),
        "scores": scores,
        "usage": {"input_tokens": found.tokens},
    }


def _entities(served: Served, question: Any) -> Body:
    params, options = _params(question)
    texts = [item["text"] for item in question.body["items"]]
    body = {"texts": texts, "labels": params.get("labels"), "threshold": options.get("threshold")}
    spans, tokens = found_spans(served, body)
    items = [
        {"id": item["id"], "entities": found, "relations": [], "classifications": [], "objects": []}
        for item, found in zip(question.body["items"], spans, strict=True)
    ]
    name = served.classifier and served.classifier.folder.name
    return {"model": name, "items": items, "usage": {"input_tokens": tokens}}


SIE_RULES: dict[str, Rule] = {
    "SieVectors": Rule(
        ("items",),
        (*_BODIES, {"items": _MIXED}),
        {
            "params.output_types": (*([kind] for kind in _TYPES), [*_TYPES]),
            "params.output_dtype": _DTYPES,
            "params.instruction": (INSTRUCTION,),
            "params.options.is_query": BOTH,
            "params.options.normalize": BOTH,
            "params.options.muvera": ({}, {"seed": 7}),
        },
        _vectors,
        frozenset({"timing"}),
        (
            *({"params.output_types": [*_TYPES], "params.output_dtype": x} for x in _DTYPES),
            {"params.instruction": INSTRUCTION, "params.options.is_query": True},
        ),
        (JSON, MESSAGE_PACK),
    ),
    "SieScores": Rule(
        ("query", "items"),
        (
            {"query": {"id": "q", "text": QUERY}, "items": _BODIES[0]["items"]},
            {"query": {"text": QUERY}, "items": [{"text": text} for text in LONG]},
            {"query": {"text": QUERY}, "items": _MIXED},
        ),
        {"instruction": (INSTRUCTION,)},
        _scores,
        formats=(JSON, MESSAGE_PACK),
        of_reranker=True,
    ),
    "SieSpans": Rule(
        ("items",),
        _BODIES,
        {"params.labels": (["PER"], ["person"], []), "params.options.threshold": (0, 0.3, 1)},
        _entities,
        formats=(JSON, MESSAGE_PACK),
    ),
}
