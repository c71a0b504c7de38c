"""The rule for spans: those of transformers' pipeline for token classification."""

from typing import Any

import numpy as np

from tests.oracle.rules import ELSEWHERE, LONG, SHORT, Body, Rule, Served, usage
from tests.oracle.truth import RefusedError


def _spans(served: Served, question: Any) -> Body:
    body, classifier = question.body, served.classifier
    if classifier is None or body.get("if_vector_space"):
        raise RefusedError
    aggregation, wanted = body.get("aggregation", "simple"), body.get("labels")
    if not {*(wanted or ())} <= classifier.labels(aggregation):
        raise RefusedError
    rows = []
    for index, text in enumerate(body["texts"]):
        spans = [
            span | {"text": text[span["start"] : span["end"]], "score": np.asarray(span["score"])}
            for span in classifier.spans(text, aggregation)
            if span["score"] >= body.get("threshold", 0)
            if wanted is None or span["label"] in wanted
        ]
        rows.append({"id": index, "spans": spans})
    tokens = sum(map(classifier.count_tokens, body["texts"]))
    return {
        "data": rows,
        "model_name": classifier.folder.name,
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
