"""POST /rerank: a query and passages in, the passages by falling score out."""

from functools import partial

from starlette.responses import Response

from smart_embedder.api.answers import RerankResponse
from smart_embedder.api.context import RERANK
from smart_embedder.api.handler import Call, Router
from smart_embedder.api.openapi import BEARER, describe_work, operation
from smart_embedder.api.rendering import render_rerank
from smart_embedder.api.schemas import (
    RerankBody,
    RerankWeights,
    check_passages,
    check_rerank_options,
    check_truncation,
)
from smart_embedder.api.work import scores
from smart_embedder.engine import FusionWeights, RerankRequest, TruncationOptions
from smart_embedder.settings.types import public_name

_TAG = {"name": "rerank", "description": "This service's own."}

router = Router(groups=[_TAG], tags=[_TAG["name"]], dependencies=[BEARER])


@operation(
    router,
    RERANK,
    "passages",
    RerankBody,
    RERANK.path,
    shared=("/v1/rerank", "/v2/rerank"),
    **describe_work("Order passages by relevance", RerankBody, RerankResponse, (404, 422)),
)
async def rerank(body: RerankBody, call: Call) -> Response:
    """A score for each passage, the best first; equal scores keep the order of the request.

    A body with `documents` is read as Cohere's, as at /v2/rerank; one with `texts` is read as
    text-embeddings-inference's, as at /models/{model}/rerank.
    """
    service, passages = call.service, body.passages
    model = service.catalogue.reranker(body.model)
    check_passages(body.query, passages, "passages", service.settings)
    check_truncation(body.truncate, body.truncation_side)
    models = await call.lease(model)
    check_rerank_options(models, instruction=body.instruction, weights=body.weights)
    weights = body.weights or RerankWeights()
    request = RerankRequest(
        query=body.query,
        passages=passages,
        normalize=body.normalize,
        instruction=body.instruction,
        weights=FusionWeights(weights.dense, weights.sparse, weights.colbert),
        truncation=TruncationOptions(body.truncate, body.truncation_side),
    )
    result = await scores(call, request, model)
    name = public_name(service.settings.reranker_name) if model is None else model.name
    return await call.render(partial(render_rerank, passages, result, name))
