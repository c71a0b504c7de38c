"""POST /embeddings/: texts in, dense, sparse and ColBERT vectors out."""

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.api.body import describe_body, error_responses, most_values, read_body
from app.api.context import context_of
from app.api.handler import note_work, rendered, unless_gone, within
from app.api.priority import urgency_of
from app.api.rendering import JsonPieces, ModelNames, estimate_bytes, render_embeddings
from app.api.schemas import EmbeddingRequest, EmbeddingResponse
from app.api.service import BEARER, Service, ServiceDep
from app.engine.types import EmbeddingResult
from app.errors import EmptyInputError, InvalidRequestError
from app.observability.metrics import EMBEDDING_ENDPOINT
from app.settings import Settings
from app.settings.model_names import public_name

router = APIRouter(tags=["embeddings"], dependencies=[BEARER])


@router.post(
    EMBEDDING_ENDPOINT,
    summary="Embed texts",
    response_model=EmbeddingResponse,
    responses=error_responses(400, 401, 403, 408, 413, 415, 422, 429, 500, 503, 504),
    openapi_extra=describe_body(EmbeddingRequest),
)
async def create_embeddings(request: Request, service: ServiceDep) -> Response:
    """Dense, sparse and ColBERT vectors of each text, from one forward pass."""
    return await within(service.settings.request_timeout, _answer(request, service))


async def _answer(request: Request, service: Service) -> Response:
    settings = service.settings
    wanted = await read_body(request, EmbeddingRequest, most_values(settings))
    _check(wanted, settings.max_sentences_per_request)
    embed = service.engine.embed(
        wanted.sentences,
        dense=wanted.return_dense,
        sparse=wanted.return_sparse,
        colbert=wanted.return_colbert,
        normalize_dense=wanted.normalize_dense,
        urgency=urgency_of(request),
        client=context_of(request.scope).client,
    )
    result = await unless_gone(request, embed)
    service.metrics.sentences.inc(len(wanted.sentences))
    note_work(request.scope, result, sentences=len(wanted.sentences))
    render = partial(_render, wanted, result, _names(settings))
    return await rendered(request, service, render, estimate_bytes(wanted.sentences, result))


def _render(wanted: EmbeddingRequest, result: EmbeddingResult, names: ModelNames) -> JsonPieces:
    return JsonPieces(
        render_embeddings(
            wanted.sentences, result, names, sparse_as_indices=wanted.sparse_as_indices
        )
    )


def _check(wanted: EmbeddingRequest, most_sentences: int) -> None:
    if not wanted.sentences:
        raise EmptyInputError("the list sentences is empty: send at least one text")
    if len(wanted.sentences) > most_sentences:
        raise InvalidRequestError(
            f"the list sentences holds {len(wanted.sentences)} texts, and at most {most_sentences} "
            "are allowed (MAX_SENTENCES_PER_REQUEST): send them in several requests"
        )
    if not (wanted.return_dense or wanted.return_sparse or wanted.return_colbert):
        raise InvalidRequestError(
            "nothing is asked for: set return_dense, return_sparse or return_colbert to true"
        )


def _names(settings: Settings) -> ModelNames:
    bge = public_name(settings.embedding_model)
    return ModelNames(dense=public_name(settings.dense_model), sparse=bge, colbert=bge)
