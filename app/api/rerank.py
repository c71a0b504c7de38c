"""POST /rerank: a query and passages in, the passages by falling score out."""

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.api.body import describe_body, error_responses, most_values, read_body
from app.api.context import context_of
from app.api.handler import note_work, rendered, unless_gone, within
from app.api.priority import urgency_of
from app.api.rendering import JsonPieces, render_rerank
from app.api.schemas import RerankBody, RerankResponse
from app.api.service import BEARER, Service, ServiceDep
from app.engine import FusionWeights, RerankRequest
from app.engine.loaded_models import LoadedModels
from app.engine.types import RerankResult
from app.errors import EmptyInputError, InvalidRequestError
from app.observability.metrics import RERANK_ENDPOINT
from app.settings.model_names import public_name

router = APIRouter(tags=["rerank"], dependencies=[BEARER])


@router.post(
    RERANK_ENDPOINT,
    summary="Order passages by relevance",
    response_model=RerankResponse,
    responses=error_responses(400, 401, 403, 408, 413, 415, 422, 429, 500, 503, 504),
    openapi_extra=describe_body(RerankBody),
)
async def rerank(request: Request, service: ServiceDep) -> Response:
    """A score for each passage, the best first; equal scores keep the order of the request."""
    return await within(service.settings.request_timeout, _answer(request, service))


async def _answer(request: Request, service: Service) -> Response:
    settings = service.settings
    wanted = await read_body(request, RerankBody, most_values(settings))
    _check(wanted, settings.max_rerank_passages)
    if service.engine.models is not None:
        _check_options(wanted, service.engine.models)
    work = service.engine.rerank(_as_request(wanted, request))
    result = await unless_gone(request, work)
    service.metrics.pairs.inc(len(wanted.passages))
    note_work(request.scope, result, passages=len(wanted.passages))
    render = partial(_render, wanted.passages, result, public_name(settings.reranker_name))
    return await rendered(request, service, render, sum(map(len, wanted.passages)))


def _render(passages: list[str], result: RerankResult, model: str) -> JsonPieces:
    return JsonPieces(render_rerank(passages, result, model))


def _check(wanted: RerankBody, most_passages: int) -> None:
    if not wanted.query.strip():
        raise EmptyInputError("the query is blank: send what the passages are to be judged by")
    if not wanted.passages:
        raise EmptyInputError("the list passages is empty: send at least one text")
    if len(wanted.passages) > most_passages:
        raise InvalidRequestError(
            f"the list passages holds {len(wanted.passages)} texts, and at most {most_passages} "
            "are allowed (MAX_RERANK_PASSAGES): send them in several requests"
        )


def _check_options(wanted: RerankBody, models: LoadedModels) -> None:
    """An option that the model cannot follow is refused: its sender would believe it had effect."""
    reranker = models.reranker
    if reranker is None and not models.late_interaction:
        return  # It is switched off, which the engine says.
    name = models.embedder.name if reranker is None else reranker.name
    if wanted.weights is not None and reranker is not None:
        raise InvalidRequestError(
            f"the option weights has no effect with the reranker {name}, which gives one score: "
            "leave it out (it is for RERANKER_MODEL=late-interaction)"
        )
    reads_instruction = reranker is not None and reranker.reads_instruction
    if wanted.instruction is not None and not reads_instruction:
        raise InvalidRequestError(
            f"the option instruction has no effect with the reranker {name}, which reads none: "
            "leave it out (it is for Qwen3-Reranker)"
        )


def _as_request(wanted: RerankBody, request: Request) -> RerankRequest:
    weights = wanted.weights
    return RerankRequest(
        query=wanted.query,
        passages=wanted.passages,
        normalize=wanted.normalize,
        instruction=wanted.instruction,
        weights=FusionWeights(weights.dense, weights.sparse, weights.colbert)
        if weights
        else FusionWeights(),
        urgency=urgency_of(request),
        client=context_of(request.scope).client,
    )
