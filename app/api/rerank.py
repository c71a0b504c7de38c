"""POST /rerank: a query and passages in, the passages by falling score out."""

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.api.handler import Call, Operation, ServiceDep, respond
from app.api.limits import check_passages
from app.api.openapi import BEARER, describe_body, error_responses
from app.api.paths import RERANK, Dialect
from app.api.rendering import render_rerank
from app.api.schemas import RerankBody, RerankResponse
from app.engine import FusionWeights, RerankRequest
from app.engine.loaded_models import LoadedModels
from app.errors import InvalidRequestError
from app.settings.model_names import public_name

router = APIRouter(tags=["rerank"], dependencies=[BEARER])


@router.post(
    RERANK.path,
    summary="Order passages by relevance",
    response_model=RerankResponse,
    responses=error_responses(400, 401, 403, 408, 413, 415, 422, 429, 500, 503, 504),
    openapi_extra=describe_body(RerankBody),
)
async def rerank(request: Request, service: ServiceDep) -> Response:
    """A score for each passage, the best first; equal scores keep the order of the request."""
    return await respond(request, service, _OPERATION)


async def _rerank(body: RerankBody, call: Call) -> Response:
    service, passages = call.service, body.passages
    check_passages(body.query, passages, "passages", service.settings)
    if service.engine.models is not None:
        _check_options(body, service.engine.models)
    work = service.engine.rerank(_engine_request(body, call))
    result = await call.run(work, passages=len(passages))
    service.metrics.pairs.inc(len(passages))
    model = public_name(service.settings.reranker_name)
    render = partial(render_rerank, passages, result, model)
    return await call.render(render, sum(map(len, passages)))


def _check_options(body: RerankBody, models: LoadedModels) -> None:
    """Refuse an option that the model ignores: the client would believe that it had an effect."""
    reranker = models.reranker
    if reranker is None and not models.late_interaction:
        return  # Reranking is switched off: the engine raises the error for that.
    name = models.embedder.name if reranker is None else reranker.name
    if body.weights is not None and reranker is not None:
        raise InvalidRequestError(
            f"the option weights has no effect with the reranker {name}, which gives one score: "
            "leave it out (it is for RERANKER_MODEL=late-interaction)"
        )
    reads_instruction = reranker is not None and reranker.reads_instruction
    if body.instruction is not None and not reads_instruction:
        raise InvalidRequestError(
            f"the option instruction has no effect with the reranker {name}, which reads none: "
            "leave it out (it is for Qwen3-Reranker)"
        )


def _engine_request(body: RerankBody, call: Call) -> RerankRequest:
    weights = body.weights
    return RerankRequest(
        query=body.query,
        passages=body.passages,
        normalize=body.normalize,
        instruction=body.instruction,
        weights=FusionWeights(weights.dense, weights.sparse, weights.colbert)
        if weights
        else FusionWeights(),
        urgency=call.urgency,
        client=call.context.client,
    )


_OPERATION = Operation(Dialect.NATIVE, RERANK, "passages", RerankBody, _rerank)
