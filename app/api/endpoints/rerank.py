"""POST /rerank: a query and passages in, the passages by falling score out."""

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.api.answers import RerankResponse
from app.api.context import RERANK, Dialect
from app.api.dialects import cohere, tei
from app.api.handler import Call, Operation, ServiceDep, respond
from app.api.openapi import BEARER, describe_work
from app.api.rendering import render_rerank
from app.api.schemas import RerankBody, check_passages, check_rerank_options, check_truncation
from app.api.work import models_for, scores
from app.engine import FusionWeights, RerankRequest, TruncationOptions
from app.settings.types import public_name

router = APIRouter(dependencies=[BEARER])


@router.post(
    RERANK.path,
    tags=["rerank"],
    **describe_work("Order passages by relevance", RerankBody, RerankResponse, 404, 422),
)
async def rerank(request: Request, service: ServiceDep) -> Response:
    """A score for each passage, the best first; equal scores keep the order of the request.

    A body with `documents` is read as Cohere's, as at /v2/rerank; one with `texts` is read as
    text-embeddings-inference's, as at /models/{model}/rerank.
    """
    return await respond(request, service, _OPERATION, tei.RERANK, cohere.RERANK)


@router.post("/v2/rerank", **cohere.DESCRIPTION)
@router.post("/v1/rerank", **cohere.DESCRIPTION)
async def rerank_documents(request: Request, service: ServiceDep) -> Response:
    """The relevance of each document to the query, from 0 to 1, the best first.

    A body with `passages` is read as this service's own, as at /rerank, and one with `texts` as
    text-embeddings-inference's.
    """
    return await respond(request, service, _OPERATION, tei.RERANK, cohere.RERANK)


async def _rerank(body: RerankBody, call: Call) -> Response:
    service, passages = call.service, body.passages
    model = service.catalogue.reranker(body.model)
    check_passages(body.query, passages, "passages", service.settings)
    check_truncation(body.truncate, body.truncation_side)
    models = await models_for(call, model)
    check_rerank_options(models, instruction=body.instruction, weights=body.weights)
    result = await scores(call, _engine_request(body), model)
    name = public_name(service.settings.reranker_name) if model is None else model.name
    render = partial(render_rerank, passages, result, name)
    return await call.render(render)


def _engine_request(body: RerankBody) -> RerankRequest:
    weights = body.weights
    return RerankRequest(
        query=body.query,
        passages=body.passages,
        normalize=body.normalize,
        instruction=body.instruction,
        weights=FusionWeights(weights.dense, weights.sparse, weights.colbert)
        if weights
        else FusionWeights(),
        truncation=TruncationOptions(body.truncate, body.truncation_side),
    )


_OPERATION = Operation(Dialect.NATIVE, RERANK, "passages", RerankBody, _rerank)
