"""POST /rerank: a query and passages in, the passages by falling score out."""

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.api.client import client_key
from app.api.priority import urgency_of
from app.api.rendering import JsonPieces, render_rerank
from app.api.requests import describe_body, error_responses, most_values, read_body
from app.api.schemas import RerankBody, RerankResponse
from app.api.service import BEARER, Service, ServiceDep
from app.api.work import note_work, rendered, unless_gone, within
from app.engine import RerankRequest, Weights
from app.errors import EmptyInputError, InvalidRequestError
from app.jobs import RerankResult
from app.model_names import public_name

router = APIRouter(tags=["rerank"], dependencies=[BEARER])


@router.post(
    "/rerank",
    summary="Order passages by relevance",
    response_model=RerankResponse,
    responses=error_responses(400, 401, 413, 422, 429, 500, 503, 504),
    openapi_extra=describe_body(RerankBody),
)
@router.post("/rerank/", include_in_schema=False)
async def rerank(request: Request, service: ServiceDep) -> Response:
    """A score for each passage, the best first; equal scores keep the order of the request."""
    return await within(service.settings.request_timeout, _answer(request, service))


async def _answer(request: Request, service: Service) -> Response:
    settings = service.settings
    wanted = await read_body(request, RerankBody, most_values(settings))
    _check(wanted, settings.max_rerank_passages)
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
        raise EmptyInputError("query is blank")
    if not wanted.passages:
        raise EmptyInputError("passages is empty: send at least one")
    if len(wanted.passages) > most_passages:
        raise InvalidRequestError(
            f"passages holds {len(wanted.passages)} texts; at most {most_passages} are allowed"
        )


def _as_request(wanted: RerankBody, request: Request) -> RerankRequest:
    weights = wanted.weights
    return RerankRequest(
        query=wanted.query,
        passages=wanted.passages,
        normalize=wanted.normalize,
        instruction=wanted.instruction,
        weights=Weights(weights.dense, weights.sparse, weights.colbert) if weights else Weights(),
        urgency=urgency_of(request),
        client=client_key(request.scope),
    )
