"""Vectors and scores as JSON."""

import orjson

from app.api.rendering import render_rerank
from app.engine.types import RerankResult
from app.observability.tracing import Timings


def test_scores_that_are_shown_as_equal_keep_the_order_of_the_request() -> None:
    scores = [0.25, 0.5, 0.5 + 1e-12, 0.75]
    result = RerankResult(scores, None, [], 0, Timings(0, 0, 0, 0))
    answer = orjson.loads(b"".join(render_rerank(list("abcd"), result, "model")))
    assert [one["index"] for one in answer["results"]] == [3, 1, 2, 0]
    assert [one["score"] for one in answer["results"]] == [0.75, 0.5, 0.5, 0.25]
