"""The rule for spans: those of transformers' pipeline for token classification."""

from typing import Any

import numpy as np

from tests.oracle.rules import ELSEWHERE, LONG, SHORT, Body, Rule, Served, usage
from tests.oracle.truth import RefusedError


def found_spans(served: Served, body: Body) -> tuple[list[list[Body]], int]:
    """Find the spans of each text, and count the tokens."""
    classifier = served.classifier
    if classifier is None:
        raise RefusedError
    aggregation, wanted = body.get("aggregation") or "simple", body.get("labels")
    if not {*(wanted or ())} <= classifier.labels(aggregation):
        raise RefusedError
    found = [
        [
            span | {"text": text[span["start"] : span["end"]], "score": np.asarray(span["score"])}
            for span in classifier.spans(text, aggregation)
            if span["score"] >= (body.get("threshold") or 0)
            if wanted is None or span["label"] in wanted
        ]
        for text in body["texts"]
    ]
    return found, sum(map(classifier.count_tokens, body["texts"]))


def _spans(served: Served, question: Any) -> Body:
    if question.body.get("if_vector_space"):
        raise RefusedError
    spans, tokens = found_spans(served, question.body)
    return {
        "data": [{"id": index, "spans": found} for index, found in enumerate(spans)],
        "model_name": served.classifier and served.classifier.folder.name,
        "warnings": [],
        "usage": usage(tokens),
    }


SPAN_RULES: dict[str, Rule] = {
    "ExtractResponse": Rule(
        ("texts",),
        tuple({"texts": texts} for texts in (SHORT, LONG)),
        {
            "labels": (["PER"], ["B-PER"], ["nothing"], []),
            "threshold": (0, 0.3, 1),
            "aggregation": ("none", "simple", "first", "average", "max"),
            "if_vector_space": (ELSEWHERE,),
            "model": (),
        },
        _spans,
        frozenset({"processing_time_ms", "timings_ms", "vector_space"}),
        ({"labels": ["B-PER"], "aggregation": "none"},),
    ),
}
