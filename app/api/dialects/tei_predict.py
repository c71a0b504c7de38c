"""text-embeddings-inference: the labels of texts, or of pairs of texts, from a cross-encoder."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter
from starlette.responses import Response

from app.api import paths
from app.api.checks import check_passages
from app.api.dialects import tei_schemas as schemas
from app.api.dialects.tei import add_headers, add_operation, reranker_of
from app.api.dialects.work import classify
from app.api.handler import Call, Operation
from app.api.openapi import BEARER
from app.api.paths import Dialect
from app.api.rendering import by_falling_score, render_list
from app.engine import ClassificationRequest
from app.engine.pipelines.reranking import sigmoid
from app.engine.types import ClassificationResult, FloatArray

router = APIRouter(dependencies=[BEARER])


async def _predict(body: schemas.PredictRequest, call: Call) -> Response:
    pairs = body.pairs
    check_passages([], pairs, "inputs", call.service.settings)
    request = ClassificationRequest(pairs, truncation=body.truncation)
    result = await classify(call, request, reranker_of(call))
    render = partial(_render, body, result)
    response = await call.render(render)
    return add_headers(response, call, request.texts, result)


def _render(body: schemas.PredictRequest, result: ClassificationResult) -> Iterator[bytes]:
    predictions = _predictions(body, result)
    if body.is_single:
        return render_list(next(predictions))
    return render_list(predictions)


def _predictions(
    body: schemas.PredictRequest, result: ClassificationResult
) -> Iterator[list[dict[str, Any]]]:
    for logits in result.logits:
        scores = logits.tolist() if body.raw_scores else probabilities(logits)
        ranked = by_falling_score(scores)
        yield [{"score": score, "label": result.labels[label]} for label, score in ranked]


def probabilities(logits: FloatArray) -> list[float]:
    """The sigmoid of one label's logit, the softmax of several."""
    if len(logits) == 1:
        return sigmoid(logits.tolist())
    powers = np.exp(logits - logits.max())
    return (powers / powers.sum()).tolist()  # type: ignore[no-any-return]


add_operation(
    router,
    Operation(Dialect.TEI, paths.TEI_PREDICT, "inputs", schemas.PredictRequest, _predict),
    schemas.Predictions,
    "The labels of each text, or pair of texts, by falling probability.",
)
